"""The columns that the source has, under our names and under those of RocketMQ's own connector.

Light: this is imported wherever Spark looks for sources, so neither numpy nor pyarrow are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from mqproc.errors import BadRequestError

# Our names with the types that Spark has for them, in its short words, in the order that they have by default.
MQPROC: Final[dict[str, str]] = {
    "store": "string",
    "topic": "string",
    "queue_id": "int",
    "queue_offset": "bigint",
    "physical_offset": "bigint",
    "size": "int",
    "message_id": "string",
    "keys": "array<string>",
    "tag": "string",
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
# The names of RocketMQ's connector for Spark, which of our columns each one is, and its type.
ROCKETMQ: Final[dict[str, tuple[str, str]]] = {
    "topic": ("topic", "string"),
    "flag": ("flag", "int"),
    "body": ("body", "binary"),
    "properties": ("properties_json", "string"),
    "brokerName": ("store_name", "string"),
    "queueId": ("queue_id", "int"),
    "queueOffset": ("queue_offset", "bigint"),
    "bornTimestamp": ("born_timestamp", "timestamp"),
    "storeTimestamp": ("store_timestamp", "timestamp"),
}
NAMINGS: Final = ("mqproc", "rocketmq")
# What a type is called in DDL, where a session says what the short word means (spark.sql.timestampType).
_IN_DDL: Final = {"timestamp": "timestamp_ltz"}


def types_of(naming: str) -> dict[str, str]:
    """All columns of a naming with their types in Spark's short words, in order."""
    return dict(MQPROC) if naming == "mqproc" else {name: kind for name, (_ours, kind) in ROCKETMQ.items()}


def schema_of(naming: str, names: Sequence[str] = ()) -> str:
    """The DDL of the named columns (none: all), the same in all sessions. Raises BadRequestError for an unknown one."""
    types = types_of(naming)
    check(naming, names)
    return ", ".join(f"{name} {in_ddl(types[name])}" for name in names or types)


def in_ddl(kind: str) -> str:
    """What a type, given in Spark's short word, is called where no session gives that another meaning."""
    return _IN_DDL.get(kind, kind)


def check(naming: str, names: Iterable[str]) -> None:
    """Raises BadRequestError for a name that is no column."""
    types = types_of(naming)
    for name in names:
        if name not in types:
            raise BadRequestError(f"no column is called {name!r}; there are {', '.join(types)}")


def sources_of(naming: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """(name, what `batches` makes it of) of each column."""
    return [(name, name if naming == "mqproc" else ROCKETMQ[name][0]) for name in names]
