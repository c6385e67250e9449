"""_sync."""
