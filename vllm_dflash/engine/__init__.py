"""Our workers, schedulers and drafting code inside vLLM's engine."""
