"""Emulate a GPU in every Python process of a dry run, before anything imports vLLM."""

from emulated import vllm_side

vllm_side.use()
