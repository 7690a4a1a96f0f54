"""What users and operators hear: the log, counters, figures for `/metrics`."""
