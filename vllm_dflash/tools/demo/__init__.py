"""`vllm-dflash demo`: a first look, with plain decoding and vLLM's own DFlash beside ours."""
