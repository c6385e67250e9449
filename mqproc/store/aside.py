"""`mqproc/aside`: what lay in the place of a store's file and was none is kept there, and never replaced."""

from __future__ import annotations

import itertools
from pathlib import Path

from mqproc.io import StoreIO
from mqproc.paths import StorePaths


def move_aside(io: StoreIO, paths: StorePaths, path: Path) -> Path:
    """Move what lies in the place of one of the store's files to `mqproc/aside/`; where it lies then."""
    target = free_place(io, paths, f"{path.parent.name}.{path.name}" if path.parent != paths.root else path.name)
    io.rename(path, target)
    return target


def free_place(io: StoreIO, paths: StorePaths, name: str) -> Path:
    """A name in `mqproc/aside/` that nothing has yet: this one, or with a number behind it."""
    io.make_folder(paths.aside, mode=0o700)
    places = (paths.aside / (f"{name}.{number}" if number else name) for number in itertools.count())
    return next(place for place in places if io.entry(place) is None)
