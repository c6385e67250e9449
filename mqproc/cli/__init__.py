"""The command line: what people and scripts do with a store, over the client and the files."""

from __future__ import annotations

from mqproc.cli.main import main

__all__ = ["main"]
