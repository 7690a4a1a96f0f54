"""`vllm-dflash verify`: checks that DFlash writes what plain decoding writes."""
