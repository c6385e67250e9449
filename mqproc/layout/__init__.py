"""Byte layouts of all files, one module a format. No other module knows an offset."""
