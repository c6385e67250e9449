"""`mqproc worker`: handle messages with a function, in a process that ends in order."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import click

from mqproc.cli.options import (
    Invocation,
    ParsedText,
    command,
    complete_group,
    complete_topic,
    filter_of,
    filter_options,
)
from mqproc.cli.topic import queues_of
from mqproc.client._async.client import AsyncClient
from mqproc.errors import GroupNotFoundError
from mqproc.types import StoredMessage
from mqproc.util.signals import stopping_signals
from mqproc.util.units import counted, parse_time_ms

Handler = Callable[[StoredMessage], Any]
_LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CHILD_CHECK_MS: Final = 200


def parse_start(text: str) -> int | str:
    """Parse `earliest`, `latest` or a time. Raises ValueError."""
    try:
        return text if text in ("earliest", "latest") else parse_time_ms(text)
    except ValueError as error:
        raise ValueError(f"{error}; or earliest, latest") from None


@command()
@click.argument("function", metavar="MODULE:FUNCTION")
@click.option(
    "--topic",
    "topics",
    multiple=True,
    required=True,
    shell_complete=complete_topic,
    help="Topic whose messages are handled; may be repeated.",
)
@click.option("--group", required=True, shell_complete=complete_group, help="Consumer group of the worker.")
@click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    metavar="N",
    help="Messages handled at a time: in threads, or as tasks for an async function.",
)
@click.option("--ordered", is_flag=True, help="Handle the messages of a queue one after the other.")
@click.option(
    "--from",
    "start",
    type=ParsedText("position", parse_start),
    metavar="WHERE",
    help="Create the group if it is missing. Where it starts: earliest, latest, or a time.",
)
@filter_options
@click.option(
    "--watch", is_flag=True, help="Start again when a Python file below the current folder changes; needs watchfiles."
)
def worker(
    invocation: Invocation,
    function: str,
    topics: tuple[str, ...],
    group: str,
    workers: int,
    ordered: bool,
    start: int | str | None,
    tags: str,
    sql: str,
    watch: bool,
) -> int:
    """Handle messages with a function of yours.

    The function is imported with the current folder on Python's path, and gets one message at a time. A message is done
    when it returns. When it raises, the exception is logged, and the message is redelivered after 10 s, 30 s, 1 m, …;
    with --ordered it is tried again before any later one. After too many failures it is a dead letter of the group.

    SIGTERM and Ctrl-C end the worker: calls that are running finish, and no other begins. A second signal ends it at
    once; the messages in hand are redelivered. Exit codes: 0 after the first signal; 2 for a function that cannot be
    imported or called; 5 for an unknown topic or group; 9 when no group runs on the store; 130 or 143 after the second
    signal.
    """
    if watch:
        return _watch(Path.cwd(), invocation.out.note)
    handler = load_handler(function)
    is_async = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)
    consumer: dict[str, Any] = {
        "group": group,
        "topics": topics,
        "filter": filter_of(tags, sql),
        "start": start or "latest",
    }
    logging.basicConfig(format=_LOG_FORMAT)  # Unless the module has configured logging.
    with invocation.client() as client:
        for topic in topics:
            queues_of(client, topic)
        if start is None and group not in {each.group for each in client.groups.all()}:
            raise GroupNotFoundError(f"no group {group!r}: --from earliest or --from latest creates it")
        place = f"{', '.join(topics)} for group {group}, {counted(workers, 'worker')}, store {client.store}"
        begun = functools.partial(invocation.out.note, f"{function} handles {place}; SIGTERM or Ctrl-C ends it")
        if not is_async:
            stop = threading.Event()
            with stopping_signals(stop.set), client.consumer(**consumer) as member:
                begun()
                member.run(handler, workers=workers, ordered=ordered, stop=stop)
            return 0

    async def run() -> None:
        stop = asyncio.Event()
        end = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
        with stopping_signals(end):
            async with AsyncClient(client.store, timeout=client.timeout_s) as own, own.consumer(**consumer) as member:
                begun()
                await member.run(handler, workers=workers, ordered=ordered, stop=stop)

    asyncio.run(run())
    return 0


def load_handler(name: str) -> Handler:
    """Import `module:function`, also from the current folder. Raises click.UsageError."""
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise click.UsageError(
            f"{name!r} is not MODULE:FUNCTION, as in tasks:handle for the function handle in tasks.py"
        )
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise click.UsageError(f"no module {error.name!r} in {os.getcwd()} or on Python's path") from error
        raise click.UsageError(f"importing {module_name} failed: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise click.UsageError(f"module {module_name} has no {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise click.UsageError(
            f"{name} is {type(found).__name__}, which cannot be called: name a function of one message"
        )
    handler: Handler = found
    return handler


def _watch(folder: Path, note: Callable[[str], None]) -> int:
    """Run this command without --watch, and again at each change; returns the last exit code."""
    try:
        import watchfiles
    except ImportError:
        raise click.UsageError("--watch needs watchfiles: pip install 'mqproc[watch]'") from None
    stop = threading.Event()
    changes = watchfiles.watch(
        folder,
        watch_filter=watchfiles.PythonFilter(),
        stop_event=stop,
        rust_timeout=_CHILD_CHECK_MS,
        yield_on_timeout=True,
        raise_interrupt=False,
    )
    next(changes)  # From now on no change is missed.
    arguments = [part for part in sys.orig_argv[1:] if part != "--watch"]
    while True:
        # In a group of its own: a terminal's Ctrl-C is forwarded, so that it arrives once.
        child = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.DEVNULL, process_group=0)

        def forward(number: int, frame: FrameType | None, child: subprocess.Popen[bytes] = child) -> None:
            stop.set()
            child.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward)
        has_ended = False
        for changed in changes:
            if changed:
                note(f"{counted(len(changed), 'file')} changed: starting again")
                child.terminate()
                break
            if not has_ended and (has_ended := child.poll() is not None):
                note(f"the worker ended with exit code {child.returncode}; waiting for a change")
        code = child.wait()
        if stop.is_set():
            return code if code >= 0 else 128 - code
