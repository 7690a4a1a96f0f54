"""Ten minutes of clients that behave, and clients that do not (`python benchmarks/soak`)."""
