"""The process that Spark's Python workers are forked from: Spark's own, whose workers end quietly.

`python.py` has it started in place of `pyspark.daemon`, with the same arguments.
"""

from __future__ import annotations

import socket

from pyspark import daemon

_worker = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Do a task, as Spark's own, and say 0; or 1 when no other is to come, also when Java has closed its end.

    Java does so where a query had enough rows (`show()`, a limit) and where a session ends: Spark's own prints a trace.
    """
    try:
        return _worker(sock, authenticated)
    except (BrokenPipeError, ConnectionResetError):
        return 1


def main() -> None:
    """Fork workers until Java ends this."""
    daemon.worker = worker
    daemon.manager()


if __name__ == "__main__":
    main()
