"""DFlash speculative decoding for vLLM, as a plugin."""

__version__ = "0.2.0"
