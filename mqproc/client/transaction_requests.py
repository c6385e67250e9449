"""Requests about transactions. No I/O."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from mqproc.client import send_requests
from mqproc.client.encoding import snapshot
from mqproc.client.message_fields import (
    SystemProperties,
    not_properties,
    plain_pair,
    plain_text,
    reserve,
    unique_id,
)
from mqproc.client.requests import Call, call_of, nothing
from mqproc.errors import (
    BadRequestError,
    NotRunningError,
    RequestTimeoutError,
    RetryLaterError,
    SendOutcomeUnknownError,
    TransactionEndedError,
)
from mqproc.layout import properties
from mqproc.layout.record_codec import messages_of, with_properties
from mqproc.topic_names import check_group
from mqproc.types import Message, OpenTransaction, SendResult, StoredMessage, TransactionResolution
from mqproc.util.arguments import BOOLEAN_TYPE_NAMES, at_least_one
from mqproc.wire.operations import (
    Operation,
    TransactionCheckRequest,
    TransactionEndRequest,
    TransactionPollRequest,
    TransactionsRequest,
)

POLL_S: Final = 15.0
POLL_MESSAGES: Final = 16
LISTED_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Handle:
    """Identification of a transaction in the request that ends it."""

    group: str
    topic: str
    transaction_id: str
    physical_offset: int


class TransactionOutcome:
    """A transaction's half message, its place and the decision."""

    def __init__(self, half: Message) -> None:
        self._half = half
        self._sent: SendResult | None = None
        self._left = False
        self.transaction_id = half.unique_id
        """The message's unique id, which identifies the transaction."""
        self.resolution = TransactionResolution.UNKNOWN
        """The decision."""

    @property
    def sent(self) -> SendResult:
        """Where the half message is stored. Raises BadRequestError before it is sent."""
        if self._sent is None:
            raise BadRequestError("the transaction has not begun")
        return self._sent

    def __repr__(self) -> str:
        state = "left open" if self._left else self.resolution if self._sent else "not begun"
        return f"{type(self).__name__}({self._half.topic!r}, {self.transaction_id!r}, {state})"

    def leave(self) -> None:
        """Decide nothing at the end of the block: a check asks a producer of the group later.

        Example: `transaction.leave()`
        """
        self._left = True

    def _handle(self, resolution: TransactionResolution) -> Handle:
        """The handle that ends the transaction.

        Raises TransactionEndedError when it has ended otherwise.
        """
        if self.resolution not in (TransactionResolution.UNKNOWN, resolution):
            raise TransactionEndedError(f"transaction {self.transaction_id} has ended with {self.resolution} already")
        return handle_of_sent(self._half, self.sent)

    @property
    def _is_decided(self) -> bool:
        """Whether the end of the block decides nothing."""
        return self._left or self.resolution is not TransactionResolution.UNKNOWN


def half_message(group: str, message: Any, check_immunity_time: int | None) -> Message:
    """Make the half message of a message. Raises BadRequestError or a subclass."""
    check_group(group)
    if not isinstance(message, Message):
        raise BadRequestError(f"a transaction has a Message, not a {type(message).__name__}")
    if message.delay_level or message.deliver_at_ms:
        raise BadRequestError("the message of a transaction has no delay level or time to deliver at")
    half = snapshot(message)
    if not isinstance(half.properties, Mapping):
        raise not_properties(half.properties)
    own = SystemProperties(itertools.starmap(plain_pair, half.properties.items()))
    own |= {properties.TRAN_MSG: "true", properties.PGROUP: plain_text(group)}
    own[properties.TRANSACTION_ID] = unique = half.unique_id or unique_id(*reserve(1))
    if check_immunity_time is not None:
        own[properties.CHECK_IMMUNITY_TIME] = str(at_least_one("check_immunity_time", check_immunity_time))
    made: Message = msgspec.structs.replace(half, unique_id=unique, properties=own)
    return made


def send_half(half: Message, *, wait: bool = True) -> Call[SendResult]:
    """Send a half message."""
    return send_requests.send(half, wait=wait, transaction=True)


def handle_of_sent(half: Message, sent: SendResult) -> Handle:
    return Handle(half.properties[properties.PGROUP], half.topic, half.unique_id, sent.physical_offset)


def handle_of_asked(group: str, message: StoredMessage) -> Handle:
    """Handle of a message that `poll` returned."""
    return Handle(group, message.topic, message.properties[properties.TRANSACTION_ID], message.physical_offset)


def handle_of_open(transaction: Any) -> Handle:
    """Handle of an open transaction. Raises BadRequestError for another object."""
    if not isinstance(transaction, OpenTransaction):
        shown = f"a {type(transaction).__name__} is no OpenTransaction: {repr(transaction)[:64]}"
        raise BadRequestError(f"{shown}; give them one by one")
    return Handle(transaction.group, transaction.topic, transaction.transaction_id, transaction.physical_offset)


def end(handle: Handle, *, commit: bool, from_check: bool = False) -> Call[None]:
    """Commit or roll back. It may be repeated: the answer is the same."""
    request = TransactionEndRequest(
        handle.group, handle.topic, handle.transaction_id, handle.physical_offset, commit, from_check
    )
    return call_of(Operation.TRANSACTION_END, request, nothing)


@contextmanager
def unknown_outcome(handle: Handle, *, commit: bool) -> Iterator[None]:
    """Context of an end request: without an answer its outcome is unknown."""
    try:
        yield
    except (RequestTimeoutError, RetryLaterError, NotRunningError) as error:
        what = f"the {'commit' if commit else 'rollback'} of transaction {handle.transaction_id}"
        raise SendOutcomeUnknownError(f"{error}; {what} may have been carried out, else its check decides") from error


def poll(group: str, timeout_s: float) -> Call[list[StoredMessage]]:
    """Wait for checks: messages as they were sent.

    The server holds the answer until there is a check.
    """
    request = TransactionPollRequest(group, POLL_MESSAGES, round(timeout_s * 1000))

    def parse(answer: Any, payload: memoryview) -> list[StoredMessage]:
        return [_as_sent(message) for message in messages_of(payload)]

    call = call_of(Operation.TRANSACTION_POLL, request, parse)
    call.wait_s = timeout_s
    return call


def _as_sent(message: StoredMessage) -> StoredMessage:
    """A half message with the topic and queue of its delivery."""
    pairs = message.properties
    own = {properties.TRANSACTION_ID: pairs.get(properties.TRANSACTION_ID) or message.unique_id or message.message_id}
    queue_id = pairs.get(properties.REAL_QID, "")
    return with_properties(
        message,
        own,
        topic=pairs.get(properties.REAL_TOPIC, message.topic),
        queue_id=int(queue_id) if queue_id.isdecimal() else message.queue_id,
        _stored_topic=message.topic,
    )


def open_transactions(group: str, ids: Sequence[str], max_transactions: int) -> Call[list[OpenTransaction]]:
    request = TransactionsRequest(group, list(ids), max_transactions)
    return call_of(
        Operation.TRANSACTIONS, request, lambda answer, _: [OpenTransaction(*row) for row in answer.transactions]
    )


def check(physical_offsets: Sequence[int]) -> Call[int]:
    """Have transactions checked now; the value is the number of open transactions."""
    request = TransactionCheckRequest(list(physical_offsets))
    return call_of(Operation.TRANSACTION_CHECK, request, lambda answer, _: int(answer.checked), repeatable=False)


def check_checker(checker: object) -> None:
    """Raise BadRequestError unless a checker can be called."""
    if not callable(checker):
        raise BadRequestError(f"checker must be a function of a message, not {type(checker).__name__}")


def resolution_of(said: object) -> TransactionResolution:
    """Resolution of a checker's result; True and False mean commit and rollback, None unknown.

    Raises BadRequestError for another result.
    """
    if type(said).__name__ in BOOLEAN_TYPE_NAMES:
        return TransactionResolution.COMMIT if said else TransactionResolution.ROLLBACK
    if said is None:
        return TransactionResolution.UNKNOWN
    name = plain_text(said)
    if isinstance(name, str) and name in TransactionResolution.__members__:
        return TransactionResolution(name)
    raise BadRequestError(f"a checker said {said!r}, which is no TransactionResolution, bool or None")
