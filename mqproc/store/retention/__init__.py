"""Retention: deletion of expired segments and of the queue and index files that point to them."""
