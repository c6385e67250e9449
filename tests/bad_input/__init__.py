"""Bad input at sockets and in files is refused with a clear error, without data loss."""
