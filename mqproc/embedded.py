"""The embedded way: `with mqproc.open(path) as client:` for a script, a notebook or a test.

Starts the group when none runs on that store, by the same command that a person would use. The last of those who opened
it so stops it again; a group that was started in another way is only used.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from mqproc.client import Client
from mqproc.client._sync.producer import close_all, flush_all
from mqproc.client.arguments import above_zero
from mqproc.config.parse import environment_warnings, read_flags
from mqproc.errors import (
    ERROR_BY_CODE,
    BadRequestError,
    MqprocError,
    NotRunningError,
    RequestTimeoutError,
    StartError,
    StoreLockedError,
)
from mqproc.ipc.control_words import read_words
from mqproc.ipc.usage_lock import RETRY_S, UsageLock
from mqproc.paths import StorePaths, checked_path

STOP_TIMEOUT_S = 120.0
# A start that is interrupted is waited for a little more: then its group can be told to stop, whatever it has come to.
INTERRUPTED_S = 5.0
_START_AGAIN_S: Final = 2.0
# A start may take hours, and tells how far it is; but for kernels, which may be compiled for minutes without a word.
_SILENCE_S: Final = 600.0
_LOOK_S: Final = 5.0
_TOLD: Final = ("epoch", "group_state", "supervisor_heartbeat_ns", "recovery_step", "recovery_done")
_ANSWER_S: Final = 2.0
_log = logging.getLogger("mqproc.open")
_ERROR_BY_EXIT_CODE = {
    error.exit_code: error
    for error in reversed(ERROR_BY_CODE.values())
    if error.exit_code not in (0, 1, StartError.exit_code)  # Several have that one: it is StartError's then.
}


class OpenedClient(Client):
    """Made by `mqproc.open`; `close`, the end of its `with` block and that of the program let the group go.

    They close its consumers first, which commits what is done, and send what its producers have left. A client that is
    closed can be used as long as its group runs, and fails at once when it does not.
    """

    _openers: UsageLock | None = None
    _process = 0

    def join(self, openers: UsageLock) -> None:
        """Be the client of one of those who use the group."""
        self._openers, self._process = openers, os.getpid()
        _opened.append(self)

    def close(self) -> None:
        """Close the consumers and the connections, and let the group go, which ends with its last user.

        Raises what a consumer's commit raises, and RequestTimeoutError when not everything of its producers was sent
        within its `timeout`, when all of that is done.
        """
        with ExitStack() as steps:
            steps.callback(self._let_go)
            steps.callback(super().close)
            steps.callback(flush_all, list(self._producers), self.timeout_s)
            for consumer in list(self._consumers):
                steps.callback(consumer.close)

    def _let_go(self) -> None:
        openers, self._openers = self._openers, None
        if openers is None:
            return
        _opened.remove(self)
        # A forked process that comes here has joined nobody.
        if os.getpid() != self._process:
            return
        ended = "has ended since"
        try:
            if _leave(self.store, openers):
                ended = "was stopped with it"
        finally:
            self._fail_fast(f"this client is closed, and its group {ended}")


_opened: list[OpenedClient] = []
"""Those that are not closed, kept for the end of the program."""


def open(path: str | Path, *, options: Mapping[str, Any] | None = None, timeout: float = 30.0) -> OpenedClient:
    """A client of the store at `path`, for a `with` block, or to be closed by its `close`.

    `options` apply when the group is started here, which is waited for as long as it takes, unless it tells of no
    progress in ten minutes; `timeout` in seconds is the client's, and how long a group that somebody else is starting
    is waited for. Raises ConfigurationError for an option that is none, and StartError and its kin with what
    `mqproc up` said.
    """
    store = checked_path(path)
    if options is not None and not isinstance(options, Mapping):
        raise BadRequestError(f"options must be a mapping of names to values, not {type(options).__name__}")
    settings = [f"{name}={value}" for name, value in (options or {}).items()]
    read_flags(settings, "options")
    timeout_s = above_zero("timeout", timeout)
    openers = UsageLock(StorePaths(store))
    try:
        _start_unless_running(store, openers, settings, timeout_s)
        client = OpenedClient(store, timeout=timeout_s)
    except BaseException as error:
        try:
            _leave(store, openers)
        except MqprocError as other:
            error.add_note(f"it is not stopped either: {other}")
        raise
    client.join(openers)
    return client


def _leave(store: Path, openers: UsageLock) -> bool:
    """Whether this was the group's last user, and has stopped it."""
    try:
        if openers.is_last():
            with suppress(NotRunningError):  # Somebody else has stopped it.
                _run_command("down", store, [], STOP_TIMEOUT_S)
                return True
        return False
    finally:
        openers.leave()


def _start_unless_running(store: Path, openers: UsageLock, settings: list[str], timeout_s: float) -> None:
    flags = [part for setting in settings for part in ("--set", setting)]
    deadline = time.monotonic() + timeout_s
    while not _is_usable(store, openers, deadline):
        try:
            # As long as it goes on: kernels may have to be compiled and a large log read. The supervisor ends roles
            # that hang.
            _run_command("up", store, ["--detach", "--opened", *flags], None)
            for line in environment_warnings(os.environ):
                _log.warning(line)
            return
        except StoreLockedError:
            # Somebody else is starting it, or was killed amid that.
            if time.monotonic() >= deadline:
                raise
            _answers_by(store, min(deadline, time.monotonic() + _START_AGAIN_S), deadline)
        finally:
            # Before, there may have been no folder to join in.
            openers.join(STOP_TIMEOUT_S)


def _is_usable(store: Path, openers: UsageLock, deadline_s: float) -> bool:
    """Whether a group runs that no other opener stops: it may be gone when it answered before this was one of them."""
    openers.join(STOP_TIMEOUT_S)
    while _answers(store, deadline_s):
        if not openers.join(STOP_TIMEOUT_S):
            return True
    return False


def _answers_by(store: Path, moment_s: float, deadline_s: float) -> bool:
    """Whether a group answers; by the moment one has to be there, by the deadline it has to have come up."""
    while not _answers(store, deadline_s):
        if time.monotonic() >= moment_s:
            return False
        time.sleep(RETRY_S)
    return True


def _answers(store: Path, deadline_s: float) -> bool:
    """Whether a group runs. One that is being started listens, and answers when it is up: it is waited for."""
    while True:
        try:
            with Client(store, timeout=_ANSWER_S) as client:
                client.health()
        except NotRunningError:
            return False
        except RequestTimeoutError:
            # Asked anew, since one that is killed meanwhile would be taken for one that restarts.
            if time.monotonic() >= deadline_s:
                raise
        else:
            return True


def _run_command(command: str, store: Path, flags: list[str], timeout_s: float | None) -> None:
    # -P: what lies in the current folder, a click.py of somebody's own, is none of the command's modules.
    arguments = [sys.executable, "-P", "-m", "mqproc", command, "--store", str(store), *flags]
    # In a session of its own: Ctrl-C is for this process, which then has to know how the command ends.
    with subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            errors = _words_of_start(child, store) if timeout_s is None else child.communicate(timeout=timeout_s)[1]
        except subprocess.TimeoutExpired:
            child.kill()
            took = "tells of no progress in" if timeout_s is None else "took more than"
            limit_s = _SILENCE_S if timeout_s is None else timeout_s
            raise StartError(f"mqproc {command} {took} {limit_s:g} s on {store}") from None
        except BaseException:
            try:
                child.communicate(timeout=INTERRUPTED_S if timeout_s is None else timeout_s)
            except subprocess.TimeoutExpired:
                child.kill()  # It has waited, too; the group's start goes on, or its stop.
            raise
    if child.returncode != 0:
        said = errors.strip().splitlines()
        kind: type[MqprocError] = _ERROR_BY_EXIT_CODE.get(child.returncode, StartError)
        raise kind(
            said[-1].removeprefix("mqproc: ") if said else f"mqproc {command} ended with code {child.returncode}"
        )


def _words_of_start(child: subprocess.Popen[str], store: Path) -> str:
    """What a start ends with on standard error. Raises TimeoutExpired for one that stands still."""
    paths = StorePaths(store)
    told, until_s = _told(paths), time.monotonic() + _SILENCE_S
    while True:
        try:
            return child.communicate(timeout=_LOOK_S)[1]
        except subprocess.TimeoutExpired:
            if (now := _told(paths)) != told:
                told, until_s = now, time.monotonic() + _SILENCE_S
            elif time.monotonic() >= until_s:
                raise


def _told(paths: StorePaths) -> list[int]:
    """What a supervisor says of its start: nothing before it has come so far."""
    with suppress(MqprocError, OSError):
        words = read_words(paths)
        return [words[name] for name in _TOLD]
    return []


def _close_all() -> None:
    """At the program's end; what producers have left is sent before the group goes."""
    with ExitStack() as clients:  # One that fails leaves the others to be closed.
        for client in _opened:
            clients.callback(client.close)
        if any(client._process == os.getpid() for client in _opened):
            close_all()


atexit.register(_close_all)
