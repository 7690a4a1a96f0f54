"""The draft model, built from vLLM's layers."""
