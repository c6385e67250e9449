"""Transactions as users see them. Names and JSON keys are the same everywhere."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TransactionResolution(enum.StrEnum):
    """What a producer says of a transaction that it is asked about. UNKNOWN: it is asked again later."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that is neither committed nor rolled back.

    `message_id`, `physical_offset` and `size` are its half message's. `checks`: how often its producers were asked.
    `next_check_ms`: Unix time of the next check.
    """

    transaction_id: str
    message_id: str
    group: str
    topic: str
    physical_offset: int
    size: int
    born_timestamp_ms: int
    store_timestamp_ms: int
    checks: int
    next_check_ms: int
