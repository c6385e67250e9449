"""Metrics for Prometheus: read from the control file at scrape, so they are the very numbers of `mqproc stat`."""
