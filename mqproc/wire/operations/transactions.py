"""Options of transaction operations; see `roles/transactions/README.md`."""

from __future__ import annotations

from mqproc.wire.codec import FrameOptions


class TransactionEndRequest(FrameOptions, frozen=True):
    """Commit or roll back. `physical_offset` is that of the half message, perhaps before checks.

    `from_check`: the answer to a check, or an operator's decision; it is never too late.
    """

    group: str
    topic: str
    transaction_id: str
    physical_offset: int
    commit: bool
    from_check: bool = False


class TransactionPollRequest(FrameOptions, frozen=True):
    """Wait for checks of a producer group's transactions, up to `timeout_ms`."""

    group: str
    max_messages: int = 32
    timeout_ms: int = 0


class TransactionPollAnswer(FrameOptions, frozen=True):
    """`count` half messages as records in the payload."""

    count: int


class TransactionsRequest(FrameOptions, frozen=True):
    """The oldest open transactions, of a producer group if named, with the given ids if any."""

    group: str = ""
    ids: list[str] = []
    max_transactions: int = 1000


TransactionRow = tuple[str, str, str, str, int, int, int, int, int, int]
"""Transaction id, message id of the half message, group, topic, physical offset, size, born time and store time in ms,
checks so far, time of the next check in ms.
"""


class TransactionsAnswer(FrameOptions, frozen=True):
    """`open`: their total. `producers`: waiting for checks, of the named group or of all."""

    open: int
    producers: int
    transactions: list[TransactionRow]


class TransactionCheckRequest(FrameOptions, frozen=True):
    """Check transactions now, by physical offset of their half messages; counts as a check."""

    physical_offsets: list[int]


class TransactionCheckAnswer(FrameOptions, frozen=True):
    """Number of open transactions among them."""

    checked: int
