"""An emulated CUDA device for tests: docs/engineering/emulated_gpu.md.

Nothing here depends on the tests that use it.
"""
