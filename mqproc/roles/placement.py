"""Which processors a role runs on, and how much it stands back for others. Called once, by the role's own process.

Left alone, the system puts a client and the writer that it wakes on one processor, since who wakes another is mostly
done itself; with frames in a row it is not, and both wait for each other while dispatch has the other processor to
itself. `writer_cpus` parts them, where clients are kept elsewhere. The other roles fill what is left of both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from mqproc.config import Options, cpu_numbers
from mqproc.errors import ConfigurationError
from mqproc.layout.control import DISPATCHER, WRITER


def writer_cpus(options: Options, allowed: frozenset[int]) -> frozenset[int]:
    """The writer's processors, out of those that the group may use: all where none is chosen.

    Raises ConfigurationError when one is chosen that the group may not use.
    """
    chosen = cpu_numbers(options.writer_cpus)
    if outside := chosen - allowed:
        missing = ", ".join(map(str, sorted(outside)))
        have = ", ".join(map(str, sorted(allowed)))
        raise ConfigurationError(
            f"writer_cpus = {options.writer_cpus!r}: this group may not use processor {missing}, only {have}"
        )
    return chosen or allowed


def take_place(role: str, options: Options) -> None:
    """Put this process where the options want its role. Raises ConfigurationError."""
    if role == WRITER and options.writer_cpus:
        with _permitted(f"writer_cpus = {options.writer_cpus!r}"):
            os.sched_setaffinity(0, writer_cpus(options, frozenset(os.sched_getaffinity(0))))
    if role == DISPATCHER and options.dispatcher_nice:
        with _permitted(f"dispatcher_nice = {options.dispatcher_nice}"):
            # Never back: who was started nicer stays so.
            os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), options.dispatcher_nice))


@contextlib.contextmanager
def _permitted(option: str) -> Iterator[None]:
    """Another start of the role would be refused as this one was."""
    try:
        yield
    except PermissionError as error:
        raise ConfigurationError(
            f"{option}: {error.strerror}; in a unit of systemd SystemCallFilter= must permit sched_setaffinity and "
            "setpriority, in a container its seccomp profile"
        ) from None
