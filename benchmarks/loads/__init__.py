"""More loads than `vllm-dflash bench` has, and timers of a step (`python benchmarks/loads`)."""
