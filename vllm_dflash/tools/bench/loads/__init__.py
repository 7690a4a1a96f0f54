"""Loads: what clients ask of an engine, and how it serves them. They see an `Engine`, not vLLM."""
