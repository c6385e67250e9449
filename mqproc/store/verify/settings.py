"""Whether settings files can be read, and hold what their readers want. Each reader says itself what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from mqproc.errors import CorruptStoreError
from mqproc.io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store import deleted_topics, rocketmq_json
from mqproc.store.delays.delay_offsets import DelayOffsets
from mqproc.store.groups import offsets_json
from mqproc.store.groups.settings import check_file
from mqproc.store.topics import Topics

_Reader = Callable[[StoreIO, StorePaths], str]


def _read_topics(io: StoreIO, paths: StorePaths) -> str:
    topics = Topics(io, paths)
    topics.load()
    return topics.file_remark


def _read_deletions(io: StoreIO, paths: StorePaths) -> str:
    deleted_topics.load(io, paths)
    return ""


_READERS: Final[dict[str, _Reader]] = {
    "topics.json": _read_topics,
    "deletedTopics.json": _read_deletions,
    "consumerOffset.json": lambda io, paths: offsets_json.load(io, paths).remark,
    "delayOffset.json": lambda io, paths: DelayOffsets.load(io, paths).remark,
    "subscriptionGroup.json": check_file,
}
"""What reads a file of `config/`; returns a remark ("" when all is well), or raises CorruptStoreError."""


def fault_of(io: StoreIO, paths: StorePaths, path: Path) -> str:
    """Why a settings file cannot be read, "" when it can, or is not there."""
    try:
        text = io.read_file(path).decode()
        if not text.strip():
            return "empty"
        value = rocketmq_json.parse(text)
    except (FileNotFoundError, IsADirectoryError):
        return ""
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        return str(error)
    if not isinstance(value, dict):
        return f"{type(value).__name__}; expected an object"
    reader = _READERS.get(path.name) if path.parent == paths.config else None
    try:
        return "" if reader is None else reader(io, paths).removeprefix(f"{path}: ")
    except IsADirectoryError:
        # In the place of what a reader takes in beside it, such as the topics' journal: its own name tells.
        return ""
    except CorruptStoreError as error:
        return str(error).removeprefix(f"{path}: ")
