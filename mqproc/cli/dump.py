"""What `mqproc store dump` tells of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mqproc.cli.output import Column
from mqproc.cli.store.file_fields import Range

Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Dump:
    """A file's content: one-off values (`head`), its large parts (`layout`), then rows."""

    kind: str
    head: dict[str, Any]
    columns: list[Column]
    rows: Rows
    layout: list[Range] = field(default_factory=list)
    is_damaged: bool = False
