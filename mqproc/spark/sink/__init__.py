"""Rows as messages of a running store, each once, whatever is killed and done again."""
