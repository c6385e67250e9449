"""Quarantine (`mqproc/aside`): invalid files found in the place of store files are kept."""

from __future__ import annotations

import itertools
from pathlib import Path

from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths


def quarantine_file(io: StoreIO, paths: StorePaths, path: Path) -> Path:
    """Move an invalid file of the store to `mqproc/aside/`; returns its new path."""
    target = free_quarantine_path(
        io, paths, f"{path.parent.name}.{path.name}" if path.parent != paths.root else path.name
    )
    io.rename(path, target)
    return target


def free_quarantine_path(io: StoreIO, paths: StorePaths, name: str) -> Path:
    """An unused path in `mqproc/aside/`: this name, with a number appended if necessary."""
    io.make_folder(paths.quarantine, mode=0o700)
    places = (paths.quarantine / (f"{name}.{number}" if number else name) for number in itertools.count())
    return next(place for place in places if io.entry(place) is None)
