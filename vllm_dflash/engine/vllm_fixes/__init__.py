"""Bugs of vLLM that we mend: a file for each, saying what is wrong and when to delete it.

docs/engineering/upstream.md has an issue for vLLM for each, with a way to reproduce it.
"""
