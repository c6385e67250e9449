"""The command line: what people and scripts do with a store, over the client and the files."""

from __future__ import annotations

try:
    from mqproc.cli.main import main
except KeyboardInterrupt:
    # Ctrl-C before there is a command that could be interrupted: 128 + SIGINT, as a shell says, and no traceback.
    raise SystemExit(130) from None

__all__ = ["main"]
