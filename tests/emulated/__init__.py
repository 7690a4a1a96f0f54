"""A CUDA device that is not there, for tests: docs/engineering/emulated_gpu.md.

Nothing here knows whose tests it serves.
"""
