"""The asynchronous client, and the source of the generated part of `_sync`."""
