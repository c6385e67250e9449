"""Options of the operations on transactions; `roles/transactions/README.md` tells what happens at each."""

from __future__ import annotations

from mqproc.wire.codec import Options


class TransactionEndRequest(Options, frozen=True):
    """Commit a transaction, or roll it back. `physical_offset` is where its half message lies, or lay before checks.

    `from_check`: the producer was asked, or an operator decides; then no time is too late.
    """

    group: str
    topic: str
    transaction_id: str
    physical_offset: int
    commit: bool
    from_check: bool = False


class TransactionPollRequest(Options, frozen=True):
    """Be asked about transactions of a producer group. The answer is held until one is due, `timeout_ms` at most."""

    group: str
    max_messages: int = 32
    timeout_ms: int = 0


class TransactionPollAnswer(Options, frozen=True):
    """`count` half messages in the payload, as records."""

    count: int


class TransactionsRequest(Options, frozen=True):
    """The oldest open transactions: of a producer group when one is named; of those transaction or message ids when
    some are."""

    group: str = ""
    ids: list[str] = []
    max_transactions: int = 1000


TransactionRow = tuple[str, str, str, str, int, int, int, int, int, int]
"""Transaction id, message id of the half message, group, topic, physical offset, size, born time and store time in ms,
checks so far, time of the next check in ms."""


class TransactionsAnswer(Options, frozen=True):
    """`open`: how many there are in all. `producers`: of the named group, or of all, how many wait to be asked."""

    open: int
    producers: int
    transactions: list[TransactionRow]


class TransactionCheckRequest(Options, frozen=True):
    """Have the producers of open transactions asked now. It counts as a check. Half messages by physical offset."""

    physical_offsets: list[int]


class TransactionCheckAnswer(Options, frozen=True):
    """How many were open."""

    checked: int
