"""`vllm-dflash verify`: is DFlash's output plain decoding's? The losslessness gate."""
