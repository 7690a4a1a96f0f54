"""The proposer and the workers that install it."""
