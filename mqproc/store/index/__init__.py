"""The index of message keys: files, flush and lookup."""
