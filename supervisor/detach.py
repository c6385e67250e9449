"""`mqproc up --detach`: the group in the background, the answer when it is ready or has failed.

    caller ── fork ──▶ session leader ── fork ──▶ supervisor
      ▲                  └ ends                      │ lines until ready, then how it went
      └──────────────────── pipe ◀───────────────────┘

The second fork makes sure that the supervisor never gets a terminal. It writes its log to the store's log file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

from mqproc.errors import MqprocError
from mqproc.io import StoreIO
from mqproc.layout.control import SUPERVISOR
from mqproc.paths import StorePaths
from mqproc.process import log, log_file
from mqproc.supervisor.hooks import Outcome, Report
from mqproc.supervisor.store_folder import prepare_folder

EXIT_FAILED: Final = 1
EXIT_NOT_BOOTED: Final = 3

Run = Callable[[Report, Callable[[], None]], Outcome]
"""The group's life: takes `report` and `ready` for `supervise`."""


def detach(run: Run, paths: StorePaths, report: Report = print) -> Outcome:
    """Run a group in the background; returns once it is ready (exit code 0) or has ended before that.

    Until then its lines are handed to `report` here; all go to the store's log, too. The caller has no threads and has
    not taken the store's lock: both would be the wrong process's.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    leader = os.fork()
    if leader == 0:
        os.close(reader)
        _lead(run, paths, writer)
    os.close(writer)
    os.waitpid(leader, 0)
    with open(reader, encoding="utf-8") as lines:
        return _follow(lines, report, paths.log)


def _follow(lines: TextIO, report: Report, log_path: Path) -> Outcome:
    for line in lines:
        message: dict[str, Any] = json.loads(line)
        if "report" in message:
            report(message["report"])
        else:
            return Outcome(message["exit_code"], message["reason"])
    return Outcome(EXIT_NOT_BOOTED, f"the supervisor ended without a word; see {log_path}")


def _lead(run: Run, paths: StorePaths, writer: int) -> NoReturn:
    code = EXIT_FAILED
    try:
        os.setsid()
        code = _supervise(run, paths, writer) if os.fork() == 0 else 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _supervise(run: Run, paths: StorePaths, writer: int) -> int:
    caller = _Caller(writer)
    log.configure(SUPERVISOR)
    try:
        prepare_folder(StoreIO(), paths)
        _redirect(paths.log)
        outcome = run(caller.report, caller.ready)
    except MqprocError as error:
        outcome = Outcome(error.exit_code, str(error))
    except Exception as error:
        log.get_logger().exception("the supervisor failed")
        outcome = Outcome(EXIT_FAILED, f"{type(error).__name__}: {error}")
    caller.finish(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    return outcome.exit_code


def _redirect(path: Path) -> None:
    """Standard input from nowhere, output to the log."""
    log_file.write_to(path)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    log.configure(SUPERVISOR)


class _Caller:
    """The waiting caller, as long as it waits. It may have gone away: then nobody is told."""

    def __init__(self, writer: int) -> None:
        self._writer = writer

    def report(self, line: str) -> None:
        log.get_logger().info(line)
        self._tell({"report": line})

    def ready(self) -> None:
        self.finish(Outcome(0, "ready"))

    def finish(self, outcome: Outcome) -> None:
        self._tell({"exit_code": outcome.exit_code, "reason": outcome.reason})
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def _tell(self, message: dict[str, Any]) -> None:
        if self._writer < 0:
            return
        try:
            os.write(self._writer, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            os.close(self._writer)
            self._writer = -1
