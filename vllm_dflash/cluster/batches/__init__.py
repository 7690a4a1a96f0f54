"""Batch inference over a dataset, with Ray Data (`examples/ray_data.py`)."""
