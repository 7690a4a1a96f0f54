"""Fixes for bugs in vLLM's V1 runner, one file per bug; see `engine/vllm_fixes`."""
