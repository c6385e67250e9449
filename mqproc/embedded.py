"""The embedded way: `with mqproc.open(path) as client:` for a script, a notebook or a test.

Starts the group when none runs on that store, by the same command that a person would use. The last of those who opened
it so stops it again; a group that was started in another way is only used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mqproc.client import Client
from mqproc.errors import (
    ERROR_BY_CODE,
    BadRequestError,
    MqprocError,
    NotRunningError,
    StartError,
    StoreLockedError,
)
from mqproc.openers import LOOK_AGAIN_S, Openers
from mqproc.paths import StorePaths

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
_ERROR_BY_EXIT_CODE = {
    error.exit_code: error for error in reversed(ERROR_BY_CODE.values()) if error.exit_code not in (0, 1)
}


@contextmanager
def open(path: str | Path, *, options: Mapping[str, Any] | None = None, timeout: float = 30.0) -> Iterator[Client]:
    """A client of the store at `path`. `options` apply when the group is started here; `timeout` in seconds is the
    client's, and how long a group that somebody else is starting is waited for.

    Raises StartError and its kin with what `mqproc up` said.
    """
    if not os.fspath(path):
        raise BadRequestError("path is empty: it names the store's folder")
    if options is not None and not isinstance(options, Mapping):
        raise BadRequestError(f"options must be a mapping of names to values, not {type(options).__name__}")
    store = Path(path).expanduser().absolute()
    openers = Openers(StorePaths(store))
    process = os.getpid()
    try:
        _start_unless_running(store, openers, options or {}, timeout)
        with Client(store, timeout=timeout) as client:
            yield client
    finally:
        # A forked process that comes here has joined nobody.
        if os.getpid() == process:
            _leave(store, openers)


def _leave(store: Path, openers: Openers) -> None:
    try:
        if openers.is_last():
            with suppress(NotRunningError):  # Somebody else has stopped it.
                _run_command("down", store, [], STOP_TIMEOUT_S)
    finally:
        openers.leave()


def _start_unless_running(store: Path, openers: Openers, options: Mapping[str, Any], timeout_s: float) -> None:
    flags = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
    while not _is_usable(store, openers):
        try:
            _run_command("up", store, ["--detach", *flags], START_TIMEOUT_S)
        except StoreLockedError:
            # Somebody else is starting it.
            if not _answers_within(store, timeout_s):
                raise
        else:
            openers.join(STOP_TIMEOUT_S)
            openers.has_started()
            return


def _is_usable(store: Path, openers: Openers) -> bool:
    """Whether a group runs that no other opener stops: it may be gone when it answered before this was one of them."""
    openers.join(STOP_TIMEOUT_S)
    while _answers(store):
        if not openers.join(STOP_TIMEOUT_S):
            return True
    return False


def _answers_within(store: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not _answers(store):
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_AGAIN_S)
    return True


def _answers(store: Path) -> bool:
    try:
        with Client(store, timeout=2.0) as client:
            client.health()
    except NotRunningError:
        return False
    return True


def _run_command(command: str, store: Path, flags: list[str], timeout_s: float) -> None:
    arguments = [sys.executable, "-m", "mqproc", command, "--store", str(store), *flags]
    try:
        done = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise StartError(f"mqproc {command} took more than {timeout_s:g} s on {store}") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        kind: type[MqprocError] = _ERROR_BY_EXIT_CODE.get(done.returncode, StartError)
        raise kind(said[-1] if said else f"mqproc {command} ended with code {done.returncode}")
