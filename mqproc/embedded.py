"""Embedded use: `with mqproc.open(path) as client:` in a script, a notebook or a test.

Starts the store's group with `mqproc up` unless one runs. The last opener stops it; a group that was started in another
way is only used.
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
from mqproc.client.codecs import CodecArgument
from mqproc.config.parse import environment_warnings, read_flags
from mqproc.errors import (
    ERROR_BY_CODE,
    BadRequestError,
    MqprocError,
    NotRunningError,
    RequestTimeoutError,
    StartError,
    StoreAccessError,
    StoreLockedError,
)
from mqproc.ipc.control_words import read_words
from mqproc.ipc.usage_lock import RETRY_S, UsageLock
from mqproc.paths import StorePaths, check_may_be_store, checked_path
from mqproc.util.arguments import above_zero
from mqproc.util.progress import PROGRESS, read_lines, show_progress

STOP_TIMEOUT_S = 120.0
# Additional wait for an interrupted start, after which its group can be stopped in any state.
INTERRUPTED_S = 5.0
_START_AGAIN_S: Final = 2.0
# A start may take hours and reports progress, except for kernels, whose compilation may take minutes.
STALL_TIMEOUT_S: Final = 600.0
PROGRESS_CHECK_S: Final = 5.0
_PROGRESS_WORDS: Final = (
    "epoch",
    "group_state",
    "supervisor_heartbeat_ns",
    "recovery_step",
    "recovery_done",
    "kernels_left",
)
ANSWER_TIMEOUT_S: Final = 2.0
_log = logging.getLogger("mqproc.open")
_ERROR_BY_EXIT_CODE = {
    error.exit_code: error
    for error in reversed(ERROR_BY_CODE.values())
    if error.exit_code not in (0, 1, StartError.exit_code)  # Several have that one: it is StartError's then.
}


class OpenedClient(Client):
    """A client that is an opener of its group, made by `mqproc.open`.

    `close` and the end of the `with` block first close its consumers, which commit, and send the remaining messages of
    its producers. After that the client can be used while its group runs; without the group its calls fail at once.
    """

    _internal = frozenset({"join"})
    _openers: UsageLock | None = None
    _process = 0

    def join(self, openers: UsageLock) -> None:
        """Count this client among the group's openers."""
        self._openers, self._process = openers, os.getpid()
        _opened.append(self)

    def close(self) -> None:
        """Close consumers and connections, and release the group.

        Afterwards raises the error of a consumer's commit, or RequestTimeoutError when messages of its producers were
        not sent within its `timeout`.
        """
        with ExitStack() as steps:
            steps.callback(self._release_group)
            steps.callback(super().close)
            steps.callback(flush_all, list(self._producers), self.timeout_s)
            for consumer in list(self._consumers):
                steps.callback(consumer.close)

    def _release_group(self) -> None:
        openers = self._openers
        if openers is None:
            return
        # A forked process is not an opener.
        if os.getpid() == self._process:
            ended = "has ended since"
            try:
                if _leave(self.store, openers):
                    ended = "was stopped with it"
            finally:
                self._fail_fast(f"this client is closed, and its group {ended}")
        # Last: a close that an interrupt ended can be repeated.
        if self in _opened:
            _opened.remove(self)
        self._openers = None


_opened: list[OpenedClient] = []
"""Clients to close at the end of the program."""


def open(
    path: str | Path,
    *,
    options: Mapping[str, Any] | None = None,
    profile: str | None = None,
    timeout: float = 30.0,
    codec: CodecArgument = None,
) -> OpenedClient:
    """Open a client of the store at `path`, for a `with` block, or to be closed by its `close`.

    `options` apply when the group is started here. `profile` gives the sizes of a new store's files: "embedded", the
    default, for a store of megabytes, or "server" as of `mqproc up`; an existing store keeps its sizes. The start may
    take any time, unless it reports no progress for ten minutes. `timeout` in seconds is that of the client, and the
    limit of the wait for a group that another process starts. `codec` is the client's. Raises ConfigurationError for
    an invalid option, and StartError or another error with the message of `mqproc up`.

    Example:
        with mqproc.open("store") as client:
            client.send("orders", b"first")
    """
    store = checked_path(path)
    if options is not None and not isinstance(options, Mapping):
        raise BadRequestError(f"options must be a mapping of names to values, not {type(options).__name__}")
    settings = [f"{name}={value}" for name, value in (options or {}).items()]
    settings += [] if profile is None else [f"profile={profile}"]
    read_flags(settings, "options")
    timeout_s = above_zero("timeout", timeout)
    openers = UsageLock(StorePaths(store))
    try:
        _start_unless_running(store, openers, settings, timeout_s)
        client = OpenedClient(store, timeout=timeout_s, codec=codec)
    except BaseException as error:
        try:
            _leave(store, openers)
        except MqprocError as other:
            error.add_note(f"the group was not stopped either: {other}")
        raise
    client.join(openers)
    return client


def _leave(store: Path, openers: UsageLock) -> bool:
    """Leave the group; stops it, and returns True, when this was the last opener."""
    try:
        if openers.is_last():
            with suppress(NotRunningError):  # Another process has stopped it.
                run_command("down", store, [], STOP_TIMEOUT_S)
                return True
        return False
    finally:
        openers.leave()


def _start_unless_running(store: Path, openers: UsageLock, settings: list[str], timeout_s: float) -> None:
    flags = [part for setting in settings for part in ("--set", setting)]
    _make_folder(StorePaths(store))
    deadline = time.monotonic() + timeout_s
    while not _is_usable(store, openers, deadline):
        try:
            # Without a limit: it may compile kernels and read a large log. The supervisor ends roles that hang.
            run_command("up", store, ["--detach", "--opened", *flags], None)
        except StoreLockedError:
            # Another process is starting it, or was killed meanwhile.
            if time.monotonic() >= deadline:
                raise
            _answers_by(store, min(deadline, time.monotonic() + _START_AGAIN_S), deadline)
        else:
            for line in environment_warnings(os.environ):
                _log.warning(line)
            if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
                _log.warning("NUMBA_DISABLE_JIT is set: the group's kernels run uncompiled, a thousand times slower")
            # Until an opener has joined, another one may stop the group.
            if not openers.join(STOP_TIMEOUT_S):
                return
        finally:
            # Lock now if the folder for the lock did not exist before.
            openers.join(STOP_TIMEOUT_S)


def _make_folder(paths: StorePaths) -> None:
    """Make the folder of a new store for the openers' lock, which counts each of them.

    Otherwise another opener could stop the group, or its start, before this one has joined.
    """
    with suppress(OSError, StoreAccessError):  # The start reports it.
        if not paths.root.exists():
            paths.root.mkdir(mode=0o700, exist_ok=True)
        if paths.root.stat().st_uid != os.geteuid():
            return
        check_may_be_store(paths)
        paths.own.mkdir(mode=0o700, exist_ok=True)


def _is_usable(store: Path, openers: UsageLock, deadline_s: float) -> bool:
    """Whether a group runs that no other opener stops: checks again after joining the openers."""
    openers.join(STOP_TIMEOUT_S)
    while _answers(store, deadline_s):
        if not openers.join(STOP_TIMEOUT_S):
            return True
    return False


def _answers_by(store: Path, moment_s: float, deadline_s: float) -> bool:
    """Whether a group answers; it must exist by `moment_s` and be up by the deadline."""
    while not _answers(store, deadline_s):
        if time.monotonic() >= moment_s:
            return False
        time.sleep(RETRY_S)
    return True


def _answers(store: Path, deadline_s: float) -> bool:
    """Whether a group runs.

    One that is being started listens, and answers when it is up: it is waited for.
    """
    while True:
        try:
            with Client(store, timeout=ANSWER_TIMEOUT_S) as client:
                client.health()
        except NotRunningError:
            return False
        except RequestTimeoutError:
            # A new client: one that is killed meanwhile would look like a restart.
            if time.monotonic() >= deadline_s:
                raise
        else:
            return True


def run_command(command: str, store: Path, flags: list[str], timeout_s: float | None) -> None:
    # -P: no module of the current folder, such as a click.py, replaces those of the command.
    arguments = [sys.executable, "-P", "-m", "mqproc", command, "--store", str(store), *flags]
    # In its own session: Ctrl-C is for this process, which needs the command's result.
    with subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": _import_path()},
    ) as child:
        try:
            errors = _errors_of_start(child, store) if timeout_s is None else child.communicate(timeout=timeout_s)[1]
        except subprocess.TimeoutExpired:
            child.kill()
            took = "reported no progress in" if timeout_s is None else "took more than"
            limit_s = STALL_TIMEOUT_S if timeout_s is None else timeout_s
            raise StartError(f"mqproc {command} {took} {limit_s:g} s on {store}") from None
        except BaseException:
            try:
                child.communicate(timeout=INTERRUPTED_S if timeout_s is None else timeout_s)
            except subprocess.TimeoutExpired:
                child.kill()  # The group's start or stop continues.
            raise
    if child.returncode != 0:
        lines = errors.strip().splitlines()
        kind: type[MqprocError] = _ERROR_BY_EXIT_CODE.get(child.returncode, StartError)
        raise kind(
            lines[-1].removeprefix("mqproc: ") if lines else f"mqproc {command} ended with code {child.returncode}"
        )


def _import_path() -> str:
    """This process's import path for a child, which needs mqproc and its packages from there.

    The script's folder comes last: no module of it, such as a click.py, replaces those of the command.
    """
    try:
        current = os.getcwd()
    except OSError:
        current = os.devnull  # It was deleted: nothing can be imported from it.
    script = os.path.dirname(os.path.join(current, getattr(sys.modules.get("__main__"), "__file__", None) or "script"))
    folders = [os.path.join(current, each).rstrip("/") for each in sys.path if os.pathsep not in each]
    return os.pathsep.join(sorted(dict.fromkeys(folders), key=script.__eq__))


def _errors_of_start(child: subprocess.Popen[str], store: Path) -> str:
    """Standard error of a start. Raises TimeoutExpired when it makes no progress."""
    paths = StorePaths(store)
    before, until_s = start_progress(paths), time.monotonic() + STALL_TIMEOUT_S
    assert child.stderr is not None
    errors = []
    for _, line in read_lines({"err": child.stderr}, PROGRESS_CHECK_S):
        if line.startswith(PROGRESS):
            show_progress(line)
        elif line:
            errors.append(line)
        if (now := start_progress(paths)) != before:
            before, until_s = now, time.monotonic() + STALL_TIMEOUT_S
        elif time.monotonic() >= until_s:
            raise subprocess.TimeoutExpired(child.args, STALL_TIMEOUT_S)
    show_progress("")
    child.wait()
    return "\n".join(errors)


def start_progress(paths: StorePaths) -> list[int]:
    """Progress words of a start; empty before the control file exists."""
    with suppress(MqprocError, OSError):
        words = read_words(paths)
        return [words[name] for name in _PROGRESS_WORDS]
    return []


def close_opened_clients() -> None:
    """Close all clients at the program's end, before their groups end."""
    with ExitStack() as clients:  # An error does not keep the others from being closed.
        for client in _opened:
            clients.callback(client.close)
        if any(client._process == os.getpid() for client in _opened):
            close_all()


atexit.register(close_opened_clients)
