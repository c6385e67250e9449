"""Shared state of processes: control file, bells, locks, histograms, errors, health."""
