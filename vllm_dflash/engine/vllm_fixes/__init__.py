"""Bugs of vLLM that we mend: a file for each, saying what is wrong and when to delete it."""
