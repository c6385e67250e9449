"""Access to an existing store: whether a path is one, and the options of its group."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final

from mqproc.config.options import Options, Profile
from mqproc.config.parse import parse_saved
from mqproc.errors import ConfigurationError, StoreAccessError, StoreNotFoundError
from mqproc.io.store_io import Kind, StoreIO
from mqproc.paths import StorePaths, dangling_link

# Symlinks are accepted: opening them follows the link.
_NO_FOLDER: Final = (Kind.FILE, Kind.OTHER)


def check_is_store(io: StoreIO, paths: StorePaths) -> None:
    """Raise StoreAccessError unless the path is a store, StoreNotFoundError if it is missing."""
    try:
        entry = io.entry(Path(os.path.realpath(paths.root)))
        log, config, own = (io.entry(folder) for folder in (paths.commit_log, paths.config, paths.own))
    except OSError as error:  # No permission, or a symlink loop.
        raise StoreAccessError(f"{paths.root}: {error.strerror}") from None
    if entry is None:
        raise StoreNotFoundError(f"{paths.root}: {dangling_link(paths.root) or 'no such folder'}")
    if entry.kind is not Kind.FOLDER:
        found = entry.kind.value if entry.kind is Kind.OTHER else f"a {entry.kind.value}"
        raise StoreAccessError(f"{paths.root}: {found}, not a store's folder")
    if log is None or log.kind in _NO_FOLDER:
        raise not_a_store(paths.root)
    for folder, found in ((paths.config, config), (paths.own, own)):
        if found is not None and found.kind in _NO_FOLDER:
            raise StoreAccessError(f"{folder}: not a folder")


def not_a_store(place: object) -> StoreAccessError:
    """The error for a folder without a log, on this machine or on remote storage."""
    return StoreAccessError(f"{place}: not a store: it has no folder commitlog")


# `mqproc/settings.json`: the options of the running group, for its roles and for tools


def write_settings(io: StoreIO, paths: StorePaths, options: Options) -> None:
    """Save the options. Raises OSError."""
    io.write_file_atomically(paths.settings, json.dumps(options.to_dict(), indent=1).encode(), mode=0o600)


def read_settings(io: StoreIO, paths: StorePaths) -> Options:
    """Load the options. Raises as `read_values`."""
    return Options(**read_values(io, paths))


def read_values(io: StoreIO, paths: StorePaths) -> dict[str, Any]:
    """Saved options by name, without unknown options of other versions.

    Raises OSError, ValueError, and ConfigurationError for an invalid value.
    """
    try:
        text = io.read_file(paths.settings)
    except IsADirectoryError:
        raise ValueError("not a file") from None
    return parse_saved(text, str(paths.settings))


def default_profile(io: StoreIO, paths: StorePaths, new: Profile) -> Profile:
    """The default of `profile`: that of the store's last group, for a new store `new`.

    It gives the sizes of kinds of files that the store lacks. RocketMQ's stores have its sizes, `server`.
    """
    with contextlib.suppress(OSError, ValueError, ConfigurationError):
        return Profile(read_values(io, paths).get("profile", Profile.SERVER))
    with contextlib.suppress(OSError):  # The start reports it.
        return Profile.SERVER if io.names(paths.commit_log) else new
    return new
