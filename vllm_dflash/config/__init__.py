"""What a user may write, resolved to a checked pair before any process starts."""
