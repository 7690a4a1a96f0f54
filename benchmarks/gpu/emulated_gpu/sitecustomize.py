"""For every Python of a dry run: a GPU that is emulated, before anything imports vLLM."""

from emulated import vllm_side

vllm_side.use()
