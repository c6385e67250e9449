"""The query role: pulls, long polling and read requests."""
