"""Progress of a start on standard error, and lines from a child's pipes as they come."""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final

PROGRESS: Final = "kernels: "
"""Beginning of a line of progress on a child's standard error."""
_READ_MAX: Final = 1 << 16
_shown = ""


def show_progress(line: str) -> None:
    """Print a line of progress; at a terminal it replaces the last one, and "" clears it."""
    global _shown
    stream = sys.stderr
    if stream is None or line == _shown:
        return
    with contextlib.suppress(OSError, ValueError):  # Closed.
        if stream.isatty():
            stream.write(f"\r\x1b[K{line}")
        elif line:
            stream.write(f"{line}\n")
        stream.flush()
    _shown = line


def read_lines(pipes: Mapping[str, IO[Any]], pause_s: float) -> Iterator[tuple[str, str]]:
    """Lines from a child's pipes, each with its pipe's name; ("", "") after a pause without one."""
    rests = dict.fromkeys(pipes, b"")
    with selectors.DefaultSelector() as selector:
        for name, pipe in pipes.items():
            selector.register(pipe, selectors.EVENT_READ, name)
        while selector.get_map():
            ready = selector.select(pause_s)
            if not ready:
                yield "", ""
            for key, _ in ready:
                piece = os.read(key.fd, _READ_MAX)
                *lines, rests[key.data] = (rests[key.data] + piece).split(b"\n")
                if not piece:
                    selector.unregister(key.fileobj)
                    lines = [rests[key.data]] if rests[key.data] else []
                for line in lines:
                    yield key.data, line.decode(errors="backslashreplace")
