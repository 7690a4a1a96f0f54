"""User settings, resolved to a checked pair before any process starts."""
