"""Fixes for bugs in vLLM: one file per bug, which says what is wrong without it, and when to
delete it.

docs/engineering/upstream.md has an issue text for each bug, with steps to reproduce it.
"""
