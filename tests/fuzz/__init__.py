"""Fuzzing of frames, records and files."""
