"""What `ps` shows: `mqproc: writer [/data/store]`."""

from __future__ import annotations

from pathlib import Path

from setproctitle import setproctitle

from mqproc.paths import shown


def process_title(role: str, store: Path) -> str:
    """The title of a role's process."""
    return f"mqproc: {role} [{shown(store)}]"


def set_title(role: str, store: Path) -> None:
    """Set this process's title, in its arguments and (cut to 15 bytes) in its `comm`."""
    setproctitle(process_title(role, store))
