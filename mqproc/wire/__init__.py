"""Frames on Unix sockets: header, options, columns; the same for all roles and both clients."""
