"""The embedded way: `with mqproc.open(path) as client:` for a script, a notebook or a test.

Starts the group when none runs on that store, by the same command that a person would use, and stops it at the end if
it started it. A group that was there already is only used.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mqproc.client import Client
from mqproc.errors import ERROR_BY_CODE, MqprocError, NotRunningError, StartError, StoreLockedError

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
LOOK_AGAIN_S = 0.05
_ERROR_BY_EXIT_CODE = {
    error.exit_code: error for error in reversed(ERROR_BY_CODE.values()) if error.exit_code not in (0, 1)
}


@contextmanager
def open(path: str | Path, *, options: Mapping[str, Any] | None = None, timeout: float = 30.0) -> Iterator[Client]:
    """A client of the store at `path`. `options` apply when the group is started here; `timeout` in seconds is the
    client's, and how long a group that somebody else is starting is waited for.

    Raises StartError and its kin with what `mqproc up` said.
    """
    store = Path(path).absolute()
    started = _start_unless_running(store, options or {}, timeout)
    try:
        with Client(store, timeout=timeout) as client:
            yield client
    finally:
        if started:
            _run_command("down", store, [], STOP_TIMEOUT_S)


def _start_unless_running(store: Path, options: Mapping[str, Any], timeout_s: float) -> bool:
    if _answers(store):
        return False
    flags = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
    try:
        _run_command("up", store, ["--detach", *flags], START_TIMEOUT_S)
    except StoreLockedError:
        # Somebody else is starting it: then it is theirs.
        if not _answers_within(store, timeout_s):
            raise
        return False
    return True


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
