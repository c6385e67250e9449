"""Logging of the group's processes, by structlog: lines for people or JSON, by the option `log_format`.

Every line has `ts`, `level`, `role`, `pid` and `event`; further fields carry their unit in their name. A line is one
write, so lines of processes that share a descriptor do not mix. Repeats of an event are limited; the count of those
left out comes with the next line of that event.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TextIO, cast

import structlog

from mqproc.config import LogFormat
from mqproc.metrics.error_log import ErrorLog
from mqproc.roles import log_file

Logger = structlog.typing.FilteringBoundLogger
EventDict = MutableMapping[str, Any]

BURST = 5
WINDOW_S = 10.0
_MOST_EVENTS = 512
# A forked process closes its parent's descriptors by number: a map that was collected afterwards would close a number
# that has another meaning by then. So none is ever collected.
_KEPT: list[ErrorLog] = []
_REMEMBERED = frozenset({"warning", "error", "critical"})
_NOT_SHOWN = frozenset({"event", "exc_info", "trace"})
_FIRST_FIELDS = ("ts", "level", "role", "pid", "event")


class RepeatLimit:
    """A structlog processor: lets `burst` lines of one event pass in each window of `window_s`."""

    def __init__(
        self, burst: int = BURST, window_s: float = WINDOW_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = burst
        self._window_s = window_s
        self._now = now
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def __call__(self, logger: Any, method: str, event: EventDict) -> EventDict:
        key = (method, str(event.get("event", "")))
        now = self._now()
        since, count = self._seen.get(key, (now, 0))
        if now - since >= self._window_s:
            if count > self._burst:
                event["left_out"] = count - self._burst
            since, count = now, 0
        if len(self._seen) >= _MOST_EVENTS and key not in self._seen:
            self._seen.clear()
        self._seen[key] = (since, count + 1)
        if count >= self._burst:
            raise structlog.DropEvent
        return event


class Remember:
    """A structlog processor: keeps warnings and errors in the store's error log, before any repeat is left out."""

    def __init__(self, errors: ErrorLog) -> None:
        self._errors = errors

    def __call__(self, logger: Any, method: str, event: EventDict) -> EventDict:
        if method in _REMEMBERED:
            fields = " ".join(f"{name}={value}" for name, value in event.items() if name not in _NOT_SHOWN)
            failure = sys.exc_info()[1] if event.get("exc_info") else None
            cause = f"{type(failure).__name__}: {failure}" if failure is not None else ""
            text = " ".join(filter(None, (f"{event.get('event', '')}", fields, cause)))
            self._errors.note(text, round(time.time() * 1000))
        return event


class _Lenient:
    """A stream whose reader may go away: a closed pipe or terminal costs lines, not the process.

    A file gets whole lines past the stream, which would keep what a full disk refuses and write it among later ones.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            fd = self._file()
            if fd is None:
                self._stream.write(text)
            else:
                log_file.write_line(fd, text.encode(errors="backslashreplace"))

    def _file(self) -> int | None:
        """The stream's descriptor while it is a file's: what it leads to may change."""
        try:
            fd = self._stream.fileno()
        except io.UnsupportedOperation:
            return None
        return fd if stat.S_ISREG(os.fstat(fd).st_mode) else None

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure(
    role: str,
    stream: TextIO | None = None,
    errors: ErrorLog | None = None,
    *,
    log_format: LogFormat = LogFormat.AUTO,
) -> None:
    """Set this process's logging up; to be called again after a fork. What goes wrong is kept in `errors` too."""
    if errors is not None:
        _KEPT.append(errors)
    stream = stream if stream is not None else sys.stderr
    terminal = stream.isatty()
    human = log_format is LogFormat.HUMAN or (log_format is LogFormat.AUTO and terminal)
    structlog.reset_defaults()
    structlog.configure(
        processors=[
            *([Remember(errors)] if errors is not None else []),
            RepeatLimit(),
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not human, key="ts"),
            *(_for_people(colors=terminal and "NO_COLOR" not in os.environ) if human else _AS_JSON),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Lenient(stream))),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(role=role, pid=os.getpid())


def get_logger() -> Logger:
    """This process's logger: `get_logger().warning("segment not ready", waited_ms=3)`."""
    return cast(Logger, structlog.get_logger())


def _for_people(*, colors: bool) -> list[structlog.typing.Processor]:
    plain = structlog.dev.plain_traceback
    return [_trace_below, structlog.dev.ConsoleRenderer(timestamp_key="ts", colors=colors, exception_formatter=plain)]


def _trace_below(logger: Any, method: str, event: EventDict) -> EventDict:
    """A process's Python stack has lines of its own, below the one that tells of its end."""
    if trace := event.pop("trace", ""):
        event["stack"] = trace
    return event


def _in_order(logger: Any, method: str, event: EventDict) -> EventDict:
    first = {name: event.pop(name) for name in _FIRST_FIELDS if name in event}
    return {**first, **event}


_AS_JSON: Final[list[structlog.typing.Processor]] = [
    structlog.processors.format_exc_info,
    _in_order,
    structlog.processors.JSONRenderer(default=str),
]
