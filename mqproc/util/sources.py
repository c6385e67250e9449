"""Sources that compiled kernels depend on, and their state when the package was imported."""

from __future__ import annotations

import os
from typing import Final

FOLDERS: Final = ("kernels", "layout")
MODULES: Final = (
    *("errors.py", "topic_names.py", "types.py"),
    *(f"util/{name}.py" for name in ("compression", "record_text", "sources", "units")),
)
"""Modules outside these folders that their files import, directly or indirectly."""

PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def kernel_sources(package: str = PACKAGE) -> list[str]:
    """Names of all files that compiled code may depend on, relative to the package, sorted."""
    names, folders = list(MODULES), list(FOLDERS)
    while folders:
        folder = folders.pop()
        for entry in os.scandir(f"{package}/{folder}"):
            if entry.name.endswith(".py"):
                names.append(f"{folder}/{entry.name}")
            elif entry.is_dir() and entry.name != "__pycache__":
                folders.append(f"{folder}/{entry.name}")
    return sorted(names)


def source_stamps(package: str = PACKAGE) -> list[tuple[str, int, int, int]]:
    """Size and times of each file. They are compared for equality only: a clock may be wrong."""
    stamps = []
    for name in kernel_sources(package):
        found = os.stat(f"{package}/{name}")
        stamps.append((name, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return stamps


def _stamps_at_import() -> list[tuple[str, int, int, int]]:
    try:
        return source_stamps()
    except OSError:
        return []  # Installed without sources.


AT_IMPORT: Final = _stamps_at_import()
"""Stamps before any other module of the package is imported: later imports may be of a newer version."""
