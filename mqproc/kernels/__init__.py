"""Compiled loops over buffers and numbers, and the primitives that they consist of (README.md)."""
