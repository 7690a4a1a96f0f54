"""Reports to users and operators: the log, counters, and figures for `/metrics`."""
