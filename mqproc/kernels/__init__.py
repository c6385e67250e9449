"""Compiled loops over buffers and numbers, and their primitives (README.md)."""
