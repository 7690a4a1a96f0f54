"""`vllm-dflash parity`: checks that the engine's drafter computes what `reference.py` does."""
