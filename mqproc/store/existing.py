"""Whether a store lies where somebody says that one does. Every tool asks here, so a wrong path has one answer."""

from __future__ import annotations

from mqproc.errors import StoreAccessError, StoreNotFoundError
from mqproc.io import Kind, StoreIO
from mqproc.paths import StorePaths


def check_is_store(io: StoreIO, paths: StorePaths) -> None:
    """Raise StoreAccessError unless a store's folder lies there, StoreNotFoundError when nothing does."""
    try:
        entry = io.entry(paths.root.resolve())
        log, config = io.entry(paths.commit_log), io.entry(paths.config)
    except (PermissionError, NotADirectoryError) as error:
        raise StoreAccessError(f"{paths.root}: {error.strerror}") from None
    if entry is None:
        raise StoreNotFoundError(f"{paths.root}: no such folder")
    if entry.kind is not Kind.FOLDER:
        raise StoreAccessError(f"{paths.root}: a {entry.kind.value}, not a store's folder")
    if log is None or log.kind is Kind.FILE:
        raise not_a_store(paths.root)
    if config is not None and config.kind is Kind.FILE:
        raise StoreAccessError(f"{paths.config}: not a folder")


def not_a_store(place: object) -> StoreAccessError:
    """What a folder without a log is told, on this machine or on remote storage."""
    return StoreAccessError(f"{place}: not a store: it has no folder commitlog")
