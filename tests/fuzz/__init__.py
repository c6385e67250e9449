"""Damaged bytes where whole ones are expected."""
