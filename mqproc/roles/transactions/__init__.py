"""Transactional messages: half messages, checks, commit and rollback."""
