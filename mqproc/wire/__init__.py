"""Frames on the Unix sockets: header, options, columns. The same for every role and both clients."""
