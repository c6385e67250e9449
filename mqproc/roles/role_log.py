"""Logging of the group's processes by structlog, as readable lines or JSON.

Every line has `ts`, `level`, `role`, `pid` and `event`; further fields have their unit in their name. A line is one
write, so lines of processes that share a descriptor do not mix. Repeats of an event are limited; the number of
suppressed lines is in `left_out` of the next line of that event.

The log may go to a file that logrotate renames. All processes of the group share its open file description, so each of
them reopens the file by name on SIGUSR1.

Nothing waits for the reader of standard output or error, such as a log collector that stalls: a line that is not taken
at once is dropped, and counted in the store's error log.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, TextIO, cast

import structlog

from mqproc.config.options import LogFormat
from mqproc.io.store_io import SYMLINK, StoreIO
from mqproc.ipc.error_log import LINES_DROPPED, ErrorLog

# Readable too, to check whether the last line is complete.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o600

_log_path: Path | None = None
Logger = structlog.typing.FilteringBoundLogger
EventDict = MutableMapping[str, Any]
BURST = 5
WINDOW_S = 10.0
_MOST_EVENTS = 512
# Keeps every ErrorLog alive. A forked process closes its parent's descriptors by number, so a mapping that is garbage
# collected later would close a descriptor number that is in use again.
_KEPT: list[ErrorLog] = []
_errors: ErrorLog | None = None
"""The error log of this process."""
_OUTPUTS: Final = (1, 2)
_RECORDED = frozenset({"warning", "error", "critical"})
_NOT_SHOWN = frozenset({"event", "exc_info", "trace"})
_FIRST_FIELDS = ("ts", "level", "role", "pid", "event")


def redirect_output(path: Path) -> None:
    """Append standard output and error to a file, here and in children. Raises OSError."""
    global _log_path
    _open(path)
    _log_path = path


def forget_log_file() -> None:
    """Disable `reopen_log_file`, after standard output and error were redirected elsewhere."""
    global _log_path
    _log_path = None


def reopen_log_file() -> bool:
    """Reopen the log file by name; False without one. On OSError the old one stays open."""
    if _log_path is None:
        return False
    _open(_log_path)
    return True


def on_reopen_signal(number: int, frame: FrameType | None) -> None:
    """Handle SIGUSR1 in children of the supervisor, which itself reports errors."""
    with contextlib.suppress(OSError):
        reopen_log_file()


def never_wait_for_readers() -> None:
    """Make standard output and error non-blocking, here and in children; not regular files.

    They are opened again where possible, since programs that share an open file also share whether it blocks.
    """
    for fd in _OUTPUTS:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
            continue
        try:
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            # It belongs to another user, or is a pipe without a reader. A terminal stays as its shell needs it.
            if stat.S_ISFIFO(mode):
                os.set_blocking(fd, False)
        else:
            os.dup2(own, fd)
            os.close(own)


def write_line(fd: int, line: bytes) -> None:
    """Append a line, after ending a partial line left by a full disk or pipe. Raises OSError.

    Only regular files are waited for; BlockingIOError says that another file does not take the whole line now.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        os.write(fd, line if _has_whole_lines(fd) else b"\n" + line)
        return
    line = b"\n" * (fd in _cut) + line
    if stat.S_ISSOCK(mode):
        with socket.socket(fileno=os.dup(fd)) as sock:
            written = sock.send(line, socket.MSG_DONTWAIT)
    else:
        written = os.write(fd, line)
    _cut.discard(fd)
    if written < len(line):
        _cut.add(fd)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


_cut: set[int] = set()
"""Descriptors that took only the beginning of the last line."""


def _has_whole_lines(fd: int) -> bool:
    io = StoreIO()
    try:
        size = io.size(fd)
        return not size or io.pread(fd, 1, size - 1) == b"\n"
    except OSError:
        # A descriptor from outside that is not readable.
        return True


def _open(path: Path) -> None:
    try:
        fd = os.open(path, _FLAGS, _MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, SYMLINK, str(path)) from None
        raise
    try:
        os.dup2(fd, 1)
        os.dup2(fd, 2)
    finally:
        os.close(fd)


class RepeatLimit:
    """Structlog processor that passes `burst` lines of an event per window of `window_s`."""

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


class RecordErrors:
    """Structlog processor that records warnings and errors, before repeats are suppressed."""

    def __init__(self, errors: ErrorLog) -> None:
        self._errors = errors

    def __call__(self, logger: Any, method: str, event: EventDict) -> EventDict:
        if method in _RECORDED:
            fields = " ".join(f"{name}={value}" for name, value in event.items() if name not in _NOT_SHOWN)
            failure = sys.exc_info()[1] if event.get("exc_info") else None
            cause = f"{type(failure).__name__}: {failure}" if failure is not None else ""
            text = " ".join(filter(None, (f"{event.get('event', '')}", fields, cause)))
            self._errors.note(text, round(time.time() * 1000))
        return event


class LineStream:
    """Stream whose `write` neither waits nor raises, and counts lines that it must drop.

    Lines bypass the stream's buffer, which would keep a line that was refused and write it later.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        try:
            try:
                fd = self._stream.fileno()
            except io.UnsupportedOperation:
                self._stream.write(text)
                return
            write_line(fd, text.encode(self._stream.encoding, self._stream.errors or "backslashreplace"))
        except OSError as error:
            if _errors is not None:
                _errors.note(f"{LINES_DROPPED}: {error.strerror}", round(time.time() * 1000))

    def flush(self) -> None:
        """Nothing is buffered."""


# What Python itself prints to standard error


def log_python_messages() -> None:
    """Log uncaught exceptions, warnings and the lines of `logging` instead of printing them."""

    def uncaught(kind: Any, error: Any, trace: Any) -> None:
        get_logger().critical("uncaught exception", exc_info=(kind, error, trace))

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        where = f"{found.err_msg or 'exception ignored in'}: {found.object!r}"
        get_logger().warning(where, exc_info=(found.exc_type, found.exc_value, found.exc_traceback))

    sys.excepthook = uncaught
    sys.unraisablehook = unraisable
    threading.excepthook = lambda ended: uncaught(ended.exc_type, ended.exc_value, ended.exc_traceback)
    logging.captureWarnings(True)
    logging.basicConfig(handlers=[_Logging(logging.WARNING)], level=logging.WARNING, force=True)


class _Logging(logging.Handler):
    """Handler of `logging` that logs with structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        get_logger().log(record.levelno, record.getMessage().rstrip(), logger=record.name, exc_info=record.exc_info)


def configure(
    role: str, stream: TextIO | None = None, errors: ErrorLog | None = None, *, log_format: LogFormat = LogFormat.AUTO
) -> None:
    """Configure logging, again after each fork. Warnings and errors also go to `errors`."""
    global _errors
    _errors = errors
    if errors is not None:
        _KEPT.append(errors)
    stream = stream if stream is not None else sys.stderr
    terminal = stream.isatty()
    human = log_format is LogFormat.HUMAN or (log_format is LogFormat.AUTO and terminal)
    structlog.reset_defaults()
    structlog.configure(
        processors=[
            *([RecordErrors(errors)] if errors is not None else []),
            RepeatLimit(),
            _origin(role),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not human, key="ts"),
            *(_as_text(colors=terminal and "NO_COLOR" not in os.environ) if human else _AS_JSON),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, LineStream(stream))),
        cache_logger_on_first_use=False,
    )


def get_logger() -> Logger:
    """Logger of this process: `get_logger().warning("segment not ready", waited_ms=3)`."""
    return cast(Logger, structlog.get_logger())


def _as_text(*, colors: bool) -> list[structlog.typing.Processor]:
    plain = structlog.dev.plain_traceback
    return [_trace_below, structlog.dev.ConsoleRenderer(timestamp_key="ts", colors=colors, exception_formatter=plain)]


def _origin(role: str) -> Callable[[Any, str, EventDict], EventDict]:
    """Processor that adds the role and process, in every thread."""
    pid = os.getpid()

    def add(_logger: Any, _method: str, event: EventDict) -> EventDict:
        event.setdefault("role", role)
        event.setdefault("pid", pid)
        return event

    return add


def _trace_below(logger: Any, method: str, event: EventDict) -> EventDict:
    """Put a process's Python stack on lines of its own below the event."""
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


# Rate limit for a log line that would repeat while a condition lasts.


INTERVAL_NS: Final = 60_000_000_000


class RateLimitedLog:
    """Writes one kind of line at most once per interval."""

    def __init__(self, write: Callable[..., object], interval_ns: int = INTERVAL_NS) -> None:
        """`write` is a method of a logger, such as `get_logger().error`."""
        self._write = write
        self._interval_ns = interval_ns
        self._next_ns: int | None = None

    def write(self, now_ns: int, event: str, **fields: object) -> bool:
        """Write the line unless one was written within the interval; returns whether it was written."""
        if self._next_ns is not None and now_ns < self._next_ns:
            return False
        self._next_ns = now_ns + self._interval_ns
        self._write(event, **fields)
        return True

    def reset(self) -> None:
        """Let the next line pass, since it describes a different condition."""
        self._next_ns = None
