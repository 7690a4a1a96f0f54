"""`vllm-dflash parity`: does the engine's drafter compute what `reference.py` computes?"""
