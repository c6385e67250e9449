"""Stores in folders: jobs that need more than a log's bytes (queues, index, settings) take no others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mqproc.errors import BadRequestError
from mqproc.spark.stores import find_stores


def local_stores(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """The folders that paths and patterns mean. Raises StoreAccessError for none, BadRequestError for a URL."""
    found = find_stores([str(path)] if isinstance(path, str | Path) else [str(each) for each in path])
    for uri in found:
        if "://" in uri:
            raise BadRequestError(f"{uri}: this job needs a store in a folder that all executors have at one path")
    return [Path(uri) for uri in found]
