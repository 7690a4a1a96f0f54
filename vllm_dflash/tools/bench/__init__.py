"""`vllm-dflash bench`: plain decoding, vLLM's native DFlash and ours, side by side."""
