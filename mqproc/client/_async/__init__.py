"""_async."""
