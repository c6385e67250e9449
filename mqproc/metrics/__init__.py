"""Metrics for Prometheus, read from the control file at each scrape, as by `mqproc stat`."""
