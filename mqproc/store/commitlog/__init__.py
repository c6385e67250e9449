"""The CommitLog: segments, append, takeover by a successor, flush and scan."""
