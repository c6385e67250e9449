"""Settings of a role's process: title, CPU affinity, niceness, allocator."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from setproctitle import setproctitle, setthreadtitle

from mqproc.config.options import Options
from mqproc.config.parse import cpu_numbers
from mqproc.errors import ConfigurationError
from mqproc.layout.control import DISPATCHER, WRITER
from mqproc.paths import printable_path

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEPT_BYTES: Final = 32 << 20


def process_title(role: str, store: Path) -> str:
    """Title of a role's process in `ps`: `mqproc: writer [/data/store]`."""
    return f"mqproc: {role} [{printable_path(store)}]"


def set_title(role: str, store: Path) -> None:
    """Set this process's title in its arguments and, cut to 15 bytes, in its `comm`.

    The `comm` must not contain a blank: since Python 3.12 `os.fork` reads the 20th word of /proc/self/stat as the
    number of threads, and with a name of two words that word is the niceness.
    """
    setproctitle(process_title(role, store))
    setthreadtitle(f"mqproc:{role}")


def writer_cpus(options: Options, allowed: frozenset[int]) -> frozenset[int]:
    """Processors for the writer; all that the group may use when `writer_cpus` is not set.

    Separate processors for writer and clients help senders of single messages: the kernel tends to put a waker and the
    process that it wakes on one processor, where both wait for each other while dispatch has the other to itself.

    Raises ConfigurationError when `writer_cpus` names a processor that the group may not use.
    """
    chosen = cpu_numbers(options.writer_cpus)
    if outside := chosen - allowed:
        missing = ", ".join(map(str, sorted(outside)))
        have = ", ".join(map(str, sorted(allowed)))
        raise ConfigurationError(
            f"writer_cpus = {options.writer_cpus!r}: this group may not use processor {missing}, only {have}"
        )
    return chosen or allowed


def set_cpu_affinity(role: str, options: Options) -> None:
    """Apply `writer_cpus` and `dispatcher_nice` to this process. Raises ConfigurationError."""
    if role == WRITER and options.writer_cpus:
        with _permitted(f"writer_cpus = {options.writer_cpus!r}"):
            os.sched_setaffinity(0, writer_cpus(options, frozenset(os.sched_getaffinity(0))))
    if role == DISPATCHER and options.dispatcher_nice:
        with _permitted(f"dispatcher_nice = {options.dispatcher_nice}"):
            # Never lower than the niceness that the group was started with.
            os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), options.dispatcher_nice))


@contextlib.contextmanager
def _permitted(option: str) -> Iterator[None]:
    """Turn a PermissionError into a ConfigurationError, which a restart does not cure."""
    try:
        yield
    except PermissionError as error:
        raise ConfigurationError(
            f"{option}: {error.strerror}; in a unit of systemd SystemCallFilter= must permit sched_setaffinity and "
            "setpriority, in a container its seccomp profile"
        ) from None


def keep_freed_memory() -> None:
    """Let glibc keep up to KEPT_BYTES of freed memory instead of returning it at once.

    Answers of megabytes are allocated and freed hundreds of times a second, and faulting in fresh pages costs more than
    filling them. Does nothing with a C library that lacks `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
