"""Helpers without knowledge of stores or messages."""
