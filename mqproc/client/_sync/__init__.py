"""The synchronous client: modules generated from `_async`, and hand-written threads."""
