"""From a checkpoint, in any dialect, to a `DrafterSpec` that fits its target."""
