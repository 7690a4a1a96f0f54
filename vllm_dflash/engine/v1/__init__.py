"""Drafting on vLLM's V1 model runner, on CPUs."""
