"""A group started in the background by this command's own `mqproc up --detach`, so that it shares no memory with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mqproc.cli.group import DOWN_TIMEOUT_S
from mqproc.cli.supervisor_client import stop_group
from mqproc.errors import NotRunningError, StartError
from mqproc.held_signals import signals_held
from mqproc.paths import StorePaths, in_shell


def start_detached(store: Path, settings: Sequence[str], config: Path | None, report: Callable[[str], None]) -> None:
    """Start a group; returns when it is ready. `report` gets its lines. Raises StartError with its last words."""
    command = [sys.executable, "-P", "-m", "mqproc", "up", "--detach", "--store", str(store)]
    command += ["--config", str(config)] if config else []
    for setting in settings:
        command += ["--set", setting]
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        with signals_held():
            # In a session of its own, so that Ctrl-C is this command's alone.
            child = subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, env=os.environ, start_new_session=True
            )
            stack.enter_context(child)
            stack.enter_context(_taken_back(child, store, report))
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stdout:
            report(line.rstrip())
        errors = child.stderr.read().strip()
    if child.returncode != 0:
        raise StartError(f"{store}: the group did not start: {errors or f'exit code {child.returncode}'}")


@contextmanager
def _taken_back(child: subprocess.Popen[str], store: Path, report: Callable[[str], None]) -> Iterator[None]:
    """A start that is interrupted leaves no group."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _take_back(child, store, report)
        raise


def _take_back(child: subprocess.Popen[str], store: Path, report: Callable[[str], None]) -> None:
    """Stop a group that was just being started, once it is up; one that the start was refused for is another's."""
    try:
        child.communicate(timeout=DOWN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        report(f"the group is starting still; mqproc down --store {in_shell(store)} stops it")
        return
    if child.returncode == 0:
        stop(store)


def stop(store: Path) -> None:
    """Stop a group in order, if it runs."""
    try:
        stop_group(StorePaths(store), DOWN_TIMEOUT_S)
    except NotRunningError:
        return


@contextmanager
def running_group(
    store: Path, settings: Sequence[str], config: Path | None, report: Callable[[str], None], *, keep: bool = False
) -> Iterator[None]:
    """A group for the length of the block; with `keep` it goes on, unless the block fails."""
    start_detached(store, settings, config, report)
    finished = False
    try:
        yield
        finished = True
    finally:
        if not (keep and finished):
            stop(store)
