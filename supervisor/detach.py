"""`mqproc up --detach`: a group in the background, whose caller waits until it is ready.

    caller ── fork ──▶ session leader ── fork ──▶ supervisor
      ▲                  └ ends                      │ lines until ready, then how it went
      └──────────────────── pipe ◀───────────────────┘

Because of the second fork the supervisor never acquires a terminal. It logs to the store's log file.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

from mqproc.errors import MqprocError, RequestTimeoutError, StoreAccessError
from mqproc.io.sigbus import install_sigbus_handler
from mqproc.io.store_io import StoreIO
from mqproc.layout.control import SUPERVISOR
from mqproc.paths import StorePaths, shell_quoted
from mqproc.roles import role_log
from mqproc.supervisor.hooks import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOT_BOOTED, Outcome, Report
from mqproc.supervisor.store_folder import prepare_folder

_READ_MAX: Final = 1 << 16
# Limit of poll's timeout.
_WAIT_MAX_S: Final = 3600.0
# Half of a pipe: the rest is for the outcome.
_UNREAD_MAX: Final = 1 << 15
_INT: Final = struct.Struct("=i")

Run = Callable[[Report, Callable[[], None], Report], Outcome]
"""Runs the group; takes `report` and `ready` for `supervise`, and a `report` of progress, which is not logged."""


def detach(
    run: Run,
    paths: StorePaths,
    report: Report = print,
    progress: Report = print,
    *,
    timeout_s: float = math.inf,
    began_s: float | None = None,
) -> Outcome:
    """Run a group in the background; return once it is ready (exit code 0) or has ended.

    Ctrl-C also ends the wait, and so does the deadline `timeout_s` after `began_s` (monotonic, default now); the start
    then continues, as the outcome's reason says. Until then lines go to `report`; all lines go to the store's log. The
    caller must have no threads and not hold the store's lock: both would stay in the wrong process.
    """
    deadline = (time.monotonic() if began_s is None else began_s) + timeout_s
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # Ctrl-C is for the caller: before the leader has left the terminal it would end the start.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    leader = os.fork()
    if leader == 0:
        os.close(reader)
        _lead(run, paths, writer, mask)
    os.close(writer)
    continues = (
        f"the start continues in the background: mqproc status --store {shell_quoted(paths.root)} shows its progress, "
        f"mqproc down --store {shell_quoted(paths.root)} ends it"
    )
    try:
        # The leader defers its own until it has left the terminal.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.waitpid(leader, 0)
        return _follow(reader, report, progress, paths, deadline)
    except TimeoutError:
        reason = f"{paths.root}: the group is not ready after {timeout_s:g} s; {continues}"
        return Outcome(RequestTimeoutError.exit_code, reason)
    except KeyboardInterrupt:
        return Outcome(EXIT_INTERRUPTED, f"{paths.root}: wait interrupted; {continues}")
    finally:
        os.close(reader)


def _follow(reader: int, report: Report, progress: Report, paths: StorePaths, deadline: float) -> Outcome:
    """Raises TimeoutError at the deadline, in monotonic seconds."""
    for line in _lines(reader, deadline):
        message: dict[str, Any] = json.loads(line)
        if "report" in message:
            report(message["report"])
        elif "progress" in message:
            progress(message["progress"])
        else:
            return Outcome(message["exit_code"], message["reason"])
    return Outcome(EXIT_NOT_BOOTED, f"the supervisor ended without a report; see {paths.log}")


def _lines(reader: int, deadline: float) -> Iterator[bytes]:
    """Lines from the pipe, until its end."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    data = b""
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        if not poll.poll(math.ceil(min(left_s, _WAIT_MAX_S) * 1000)):
            if not left_s:
                raise TimeoutError
            continue
        piece = os.read(reader, _READ_MAX)
        if not piece:
            return
        *lines, data = (data + piece).split(b"\n")
        yield from lines


def _lead(run: Run, paths: StorePaths, writer: int, mask: set[int | signal.Signals]) -> NoReturn:
    code = EXIT_FAILED
    try:
        os.setsid()
        # Discard a pending Ctrl-C.
        signal.signal(signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = _supervise(run, paths, writer) if os.fork() == 0 else 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _supervise(run: Run, paths: StorePaths, writer: int) -> int:
    caller = _Caller(writer)
    install_sigbus_handler(caller.end_with)
    role_log.configure(SUPERVISOR)
    try:
        prepare_folder(StoreIO(), paths)
        _redirect(paths.log)
        role_log.log_python_messages()
        outcome = run(caller.report, caller.ready, caller.progress)
    except MqprocError as error:
        outcome = Outcome(error.exit_code, str(error))
    except Exception as error:
        role_log.get_logger().exception("the supervisor failed")
        outcome = Outcome(EXIT_FAILED, f"{type(error).__name__}: {error}")
    caller.finish(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    return outcome.exit_code


def _redirect(path: Path) -> None:
    """Redirect standard input from /dev/null, output to the log. Raises StoreAccessError."""
    try:
        role_log.redirect_output(path)
    except OSError as error:
        raise StoreAccessError(f"{path}: {error.strerror}") from None
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    role_log.configure(SUPERVISOR)


class _Caller:
    """The waiting caller. If it has ended, messages are dropped; lines also while it is slow."""

    def __init__(self, writer: int) -> None:
        self._writer = writer
        os.set_blocking(writer, False)

    def report(self, line: str) -> None:
        role_log.get_logger().info(line)
        self._tell({"report": line})

    def progress(self, line: str) -> None:
        self._tell({"progress": line})

    def _tell(self, message: dict[str, Any]) -> None:
        if self._writer >= 0 and _unread_bytes(self._writer) < _UNREAD_MAX:
            self._send(message)

    def ready(self) -> None:
        self.finish(Outcome(0, "ready"))

    def finish(self, outcome: Outcome) -> None:
        self._send({"exit_code": outcome.exit_code, "reason": outcome.reason})
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def end_with(self, text: str, code: int) -> NoReturn:
        """Report an error and exit at once. The caller first: the log keeps errors in a map."""
        self.finish(Outcome(code, text))
        role_log.get_logger().error(text)
        os._exit(code)

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer < 0:
            return
        try:
            os.write(self._writer, json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, BlockingIOError):
            os.close(self._writer)
            self._writer = -1


def _unread_bytes(pipe: int) -> int:
    found = fcntl.ioctl(pipe, termios.FIONREAD, bytes(_INT.size))
    return int(_INT.unpack(found)[0])
