"""Retention: deletion of expired segments, and of queue and index files with them."""
