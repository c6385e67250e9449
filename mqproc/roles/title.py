"""What `ps` shows: `mqproc: writer [/data/store]`."""

from __future__ import annotations

from pathlib import Path

from setproctitle import setproctitle, setthreadtitle

from mqproc.paths import shown


def process_title(role: str, store: Path) -> str:
    """The title of a role's process."""
    return f"mqproc: {role} [{shown(store)}]"


def set_title(role: str, store: Path) -> None:
    """Set this process's title, in its arguments and (without the store, cut to 15 bytes) in its `comm`.

    That has no blank: from Python 3.12 on a fork takes the 20th word of /proc/self/stat for the count of threads, which
    is the niceness where the name is two words.
    """
    setproctitle(process_title(role, store))
    setthreadtitle(f"mqproc:{role}")
