"""Reads a drafter checkpoint, in any dialect, into a `DrafterSpec` that fits its target."""
