"""The sink's options and the columns that it takes. Light: Spark imports this to learn of the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mqproc.errors import BadRequestError
from mqproc.spark.columns import in_ddl
from mqproc.spark.options import without_scheme

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

QUEUES: Final = 8
"""Queues of a topic that a write makes."""

COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "topic": ("string",),
    "body": ("binary", "string"),
    "tag": ("string",),
    "keys": ("array<string>", "string"),
    "queue_id": ("int",),
    "properties": ("map<string,string>",),
    "flag": ("int",),
    "born_timestamp": ("timestamp",),
}
"""What a row may have, and of which types: the source's columns that are the sender's to choose."""

_KNOWN: Final = ("path", "topic", "queues", "queueId", "writeId", "checkpointLocation")


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Where rows go: `store` is a folder whose group runs on the executors' machine."""

    store: str
    topic: str = ""
    """For all rows; "": each has its own."""
    queue_id: int | None = None
    """For all rows; None: each has its own, or the rows of a partition go to one queue."""
    queues: int = QUEUES
    write_id: str = ""
    """The name that a batch write is known again by; "": it is another one each time."""


def write_options(given: Mapping[str, str], *, overwrite: bool) -> WriteOptions:
    """Options of a write. Raises BadRequestError that names option, value and what it may be."""
    names = {name.lower(): name for name in _KNOWN}
    values: dict[str, str] = {}
    for name, value in given.items():
        if name.lower() not in names:
            raise BadRequestError(f"option {name!r} is not known; there are {', '.join(sorted(_KNOWN[:-1]))}")
        values[names[name.lower()]] = str(value)
    if overwrite:
        raise BadRequestError("messages are appended: there is no overwrite; mode('append') writes")
    store = without_scheme(values.get("path", ""))
    if not store or "://" in store:
        raise BadRequestError(f"path = {store!r}: rows are written to one store, given as its folder")
    queue_id = _integer(values, "queueId", 0, (1 << 31) - 1) if "queueId" in values else None
    return WriteOptions(
        store,
        values.get("topic", ""),
        queue_id,
        _integer(values, "queues", 1, 1 << 16) if "queues" in values else QUEUES,
        values.get("writeId", ""),
    )


def _integer(values: Mapping[str, str], name: str, low: int, high: int) -> int:
    try:
        number = int(values[name])
    except ValueError:
        raise BadRequestError(f"option {name} = {values[name]!r} is no integer") from None
    if not low <= number <= high:
        raise BadRequestError(f"option {name} = {number:,} is not in [{low:,}, {high:,}]")
    return number


def check_columns(options: WriteOptions, schema: StructType) -> None:
    """Raise BadRequestError for a column that cannot be written, and for one that is missing."""
    names = schema.fieldNames()
    for field in schema.fields:
        if field.name not in COLUMNS:
            raise BadRequestError(
                f"column {field.name} cannot be written; select of {', '.join(COLUMNS)} what messages shall have"
            )
        has = field.dataType.simpleString()
        if has not in COLUMNS[field.name]:
            allowed = " or ".join(map(in_ddl, COLUMNS[field.name]))
            raise BadRequestError(f"column {field.name} is {has}; it must be {allowed}")
    if "body" not in names:
        raise BadRequestError("no column is called body")
    if "topic" not in names and not options.topic:
        raise BadRequestError("no column is called topic; the option topic is one for all rows")
