"""Shared state of processes: control file words, bells, locks, histograms, error counters and log."""
