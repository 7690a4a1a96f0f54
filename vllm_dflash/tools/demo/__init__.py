"""`vllm-dflash demo`: plain decoding, vLLM's own DFlash and ours on the same texts."""
