"""The synchronous client: modules generated from `_async`, and threads, locks and sockets written by hand."""
