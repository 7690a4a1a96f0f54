"""Loads: what clients ask of an engine, and how it serves them. They step it by hand."""
