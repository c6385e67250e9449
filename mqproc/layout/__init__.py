"""Every byte offset of every file: one module a format, and nothing else knows an offset."""
