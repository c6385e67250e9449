"""Reads: pulls, lookups by key and time, scans, and a reader for any store's files."""
