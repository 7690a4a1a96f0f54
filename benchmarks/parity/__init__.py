"""Checks that the engine computes a drafter as the reference does (`python benchmarks/parity`)."""
