"""Bugs of vLLM's V1 runner that we fix, as `engine/vllm_fixes` does for what both runners use."""
