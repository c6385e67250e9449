"""The process that Spark's Python workers are forked from: Spark's own, whose workers end quietly.

`python.py` has it started in place of `pyspark.daemon`, with the same arguments.
"""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING

from pyspark import daemon

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_worker = daemon.worker
_CLOSED = (BrokenPipeError, ConnectionResetError)


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Do a task, as Spark's own, and say 0; or 1 when no other is to come, also when Java has closed its end.

    Java does so where a query had enough rows (`show()`, a limit) and where a session ends: Spark's own prints a trace.
    """
    sys.unraisablehook = _tell_unless_closed
    try:
        return _worker(sock, authenticated)
    except _CLOSED:
        return 1


def _tell_unless_closed(unraisable: UnraisableHookArgs) -> None:
    """A file that cannot write its rest as it is let go of: since Python 3.13 that is told too."""
    if not isinstance(unraisable.exc_value, _CLOSED):
        sys.__unraisablehook__(unraisable)


def main() -> None:
    """Fork workers until Java ends this."""
    daemon.worker = worker
    daemon.manager()


if __name__ == "__main__":
    main()
