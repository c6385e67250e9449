"""The columns of messages: one definition for reads, pulls, exports and Spark.

Spark imports this module to discover its source, so it imports neither numpy nor pyarrow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Final

from mqproc.errors import BadRequestError, ConfigurationError
from mqproc.util.arguments import each_of

# In their default order, with Spark's short type names; "dictionary" is a string of few distinct values.
MESSAGE_COLUMNS: Final[dict[str, str]] = {
    "topic": "dictionary",
    "queue_id": "int",
    "queue_offset": "bigint",
    "physical_offset": "bigint",
    "size": "int",
    "message_id": "string",
    "keys": "array<string>",
    "tag": "dictionary",
    "body": "binary",
    "properties": "map<string,string>",
    "flag": "int",
    "sys_flag": "int",
    "born_timestamp": "timestamp",
    "born_host": "string",
    "store_timestamp": "timestamp",
    "store_host": "string",
    "reconsume_times": "int",
    "prepared_transaction_offset": "bigint",
    "body_crc": "int",
}
INTERNAL_COLUMNS: Final = frozenset(
    {
        "physical_offset",
        "size",
        "message_id",
        "flag",
        "sys_flag",
        "born_host",
        "store_host",
        "reconsume_times",
        "prepared_transaction_offset",
        "body_crc",
    }
)
"""RocketMQ's own fields, which are read when named, or with all."""
USER_COLUMNS: Final = tuple(name for name in MESSAGE_COLUMNS if name not in INTERNAL_COLUMNS)
ALL: Final = "all"
"""In place of a list of columns: RocketMQ's internal fields too."""

Columns = Sequence[str] | str | None
"""Columns as users name them: a list, "all", or None for those that are not internal."""


def column_names(columns: Columns) -> tuple[str, ...]:
    """The named columns. Raises BadRequestError for an unknown or repeated one."""
    if columns is None:
        return USER_COLUMNS
    if isinstance(columns, str) and str.__str__(columns) == ALL:
        return tuple(MESSAGE_COLUMNS)
    if isinstance(columns, str | bytes):
        raise BadRequestError(f'columns = {columns!r}: give a list of names, or "{ALL}"')
    names = tuple(str.__str__(name) if isinstance(name, str) else name for name in each_of("columns", columns))
    for name in names:
        if not isinstance(name, str) or name not in MESSAGE_COLUMNS:
            raise BadRequestError(f"no column is called {name!r}; there are {', '.join(MESSAGE_COLUMNS)}")
    if len(set(names)) < len(names):
        raise BadRequestError(f"columns = {list(names)!r} has a name more than once")
    return names


@contextlib.contextmanager
def needs_package(extra: str) -> Iterator[None]:
    """Raise ConfigurationError for a package that a block imports and that is not installed.

    `extra`: of mqproc, which installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error.name} is not installed: pip install 'mqproc[{extra}]'") from None
