"""Draft trees: grown, placed, attended, walked and settled on the device."""
