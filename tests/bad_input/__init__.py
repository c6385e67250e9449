"""Bad input at real sockets and in real files is refused with a clear error and loses no data."""
