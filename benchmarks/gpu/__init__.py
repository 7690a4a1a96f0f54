"""What a GPU shows in under 40 minutes: tests, verify, parity, bench (`make gpu`)."""
