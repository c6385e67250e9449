"""The compiled loops over buffers and numbers, and the few primitives they are made of.

See README.md here.
"""
