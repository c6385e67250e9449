"""Transactions: a message that is stored now, and delivered when its producer has decided.

transaction ──half message──▶ the producer's own work ──commit──▶ delivered
                                      └──rollback, or an exception──▶ never delivered
                                      └──the producer dies──▶ another one of its group is asked
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from mqproc.client import threads, transaction_calls
from mqproc.client.core import QUERY
from mqproc.client.lines import Line
from mqproc.client.outage import Outage
from mqproc.client.retry import ConnectionLost
from mqproc.client.transaction_calls import POLL_S, Handle
from mqproc.errors import BadRequestError, MqprocError, PermissionDeniedError, TransactionEndedError
from mqproc.message import Message, SendResult, StoredMessage
from mqproc.store.groups.settings import check_group
from mqproc.transactions import OpenTransaction, TransactionResolution

if TYPE_CHECKING:
    from mqproc.client.sync import Client

T = TypeVar("T")
Checker = Callable[[StoredMessage], TransactionResolution | bool | None]
"""Says what became of the transaction of a message: True commits it, False rolls it back, None does not know."""
_log = logging.getLogger("mqproc.transactions")


class Begun:
    """What a transaction knows: its half message, where that lies, and what was decided."""

    def __init__(self, half: Message) -> None:
        self._half = half
        self._sent: SendResult | None = None
        self._left = False
        self.transaction_id = half.unique_id
        """The message's unique id, which the transaction is known by."""
        self.resolution = TransactionResolution.UNKNOWN
        """What has been decided."""

    @property
    def sent(self) -> SendResult:
        """Where the half message lies. Raises BadRequestError before it is sent."""
        if self._sent is None:
            raise BadRequestError("the transaction has not begun")
        return self._sent

    def leave(self) -> None:
        """Decide nothing at the end of the block: a check asks a producer of the group later."""
        self._left = True

    def _handle(self, wanted: TransactionResolution) -> Handle:
        """What the transaction is ended by. Raises TransactionEndedError when it has ended otherwise."""
        if self.resolution not in (TransactionResolution.UNKNOWN, wanted):
            raise TransactionEndedError(f"transaction {self.transaction_id} has ended with {self.resolution} already")
        return transaction_calls.handle_of_sent(self._half, self.sent)

    @property
    def _is_settled(self) -> bool:
        """Whether the end of the block has nothing to do."""
        return self._left or self.resolution is not TransactionResolution.UNKNOWN

    def _note(self, error: BaseException, failure: MqprocError) -> None:
        error.add_note(f"the rollback of transaction {self.transaction_id} failed: {failure}")


class Transaction(Begun):
    """One message and its outcome, made by `Client.transaction`.

        with client.transaction("billing", Message("orders", b"paid")) as transaction:
            database.execute("INSERT …", transaction.transaction_id)

    The half message is stored when the block begins. Its end commits, an exception rolls back, unless that was decided
    before. Not for several threads at once.
    """

    def __init__(self, client: Client, half: Message) -> None:
        super().__init__(half)
        self._client = client

    def begin(self) -> Self:
        """Store the half message, once. Raises as `Client.send`; after a lost answer a check decides what is stored."""
        if self._sent is None:
            self._sent = self._client.run(transaction_calls.send_half(self._half))
        return self

    def commit(self) -> None:
        """Have the message delivered. When it was committed already nothing happens.

        Raises TransactionEndedError when it was rolled back or given up, TransactionOverdueError when its own
        `check_immunity_time` is over, SendOutcomeUnknownError when the answer was lost: then its check decides.
        """
        self._end(TransactionResolution.COMMIT)

    def rollback(self) -> None:
        """Have the message never delivered. Raises as `commit`."""
        self._end(TransactionResolution.ROLLBACK)

    def _end(self, wanted: TransactionResolution) -> None:
        _end(self._client, self._handle(wanted), commit=wanted is TransactionResolution.COMMIT)
        self.resolution = wanted

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_settled:
            return
        if error is None:
            self.commit()
            return
        try:
            self.rollback()
        except MqprocError as failure:
            self._note(error, failure)


def _end(client: Client, handle: Handle, *, commit: bool, from_check: bool = False) -> None:
    with transaction_calls.telling_unknown(handle, commit=commit):
        client.run(transaction_calls.end(handle, commit=commit, from_check=from_check))


class TransactionProducer:
    """A producer of a group that can be asked about the group's transactions, made by `Client.transaction_producer`.

        with client.transaction_producer("billing", lambda message: paid(message.keys[0])) as producer:
            with producer.transaction(Message("orders", b"paid", keys=["order-1"])):
                pay("order-1")

    A thread waits to be asked and calls `checker`, one message at a time. When that raises it is logged, and the
    question comes again.
    """

    def __init__(self, client: Client, group: str, checker: Checker) -> None:
        check_group(group)
        transaction_calls.check_checker(checker)
        self._client = client
        self.group = group
        self._checker = checker
        self._closing = threading.Event()
        self._line: Line | None = None
        self.failure: MqprocError | None = None
        """Why it cannot be asked any more, None while it can."""
        self._thread = threading.Thread(target=self._run, name="mqproc-transactions", daemon=True)
        threads.start(self._thread)

    def transaction(self, message: Message, *, check_immunity_time: int | None = None) -> Transaction:
        """A transaction of this group; see `Client.transaction`. Raises what has ended the producer, if anything."""
        if self.failure is not None:
            raise self.failure
        return self._client.transaction(self.group, message, check_immunity_time=check_immunity_time)

    def close(self) -> None:
        """Not be asked any more. Transactions that are open stay so."""
        self._closing.set()
        line = self._line
        if line is not None and not line.connection.inherited:
            with contextlib.suppress(OSError):  # The thread has closed it already.
                line.connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(self._client.timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._answer_checks()
        finally:
            self._let_go()

    def _answer_checks(self) -> None:
        outage = Outage("mqproc.transactions", f"waiting for checks of group {self.group}", self._client.retry)
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                for message in self._poll():
                    self._resolve(message)
                outage.over()
                continue
            except (BadRequestError, PermissionDeniedError) as error:
                self.failure = error
                return
            except (MqprocError, ConnectionLost) as error:
                pause_s = outage.failed(error, time.monotonic() - began)
            self._let_go()
            self._closing.wait(pause_s)

    def _poll(self) -> list[StoredMessage]:
        if self._line is None:
            self._line = self._client.take_line(QUERY)
            if self._closing.is_set():  # `close` has not seen this line, so it would wait for its answer.
                return []
        call = transaction_calls.poll(self.group, POLL_S)
        return self._line.ask(call, self._client.deadline_of(call))

    def _resolve(self, message: StoredMessage) -> None:
        if self._closing.is_set():
            return
        try:
            said = transaction_calls.resolution_of(self._checker(message))
        except Exception:
            _log.warning("checking transaction of message %s failed", message.message_id, exc_info=True)
            return
        if said is not TransactionResolution.UNKNOWN:
            handle = transaction_calls.handle_of_asked(self.group, message)
            try:
                _end(self._client, handle, commit=said is TransactionResolution.COMMIT, from_check=True)
            except MqprocError as error:
                # Decided elsewhere meanwhile, or asked about again.
                _log.warning("transaction %s was not ended: %s", handle.transaction_id, error)

    def _let_go(self) -> None:
        if self._line is not None:
            self._line.connection.close()
            self._line = None


class Transactions:
    """Open transactions: looking at them, and deciding them in the place of their producers. Made by the client.

    for transaction in client.transactions.open("billing"):
        client.transactions.rollback(transaction)
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def open(
        self, group: str = "", *, ids: list[str] | None = None, max_transactions: int = 1000
    ) -> list[OpenTransaction]:
        """The oldest open transactions: of a producer group, or of all; of those transaction or message ids only."""
        return self._client.run(transaction_calls.open_transactions(group, ids or (), max_transactions))

    def commit(self, transaction: OpenTransaction) -> None:
        """Have the message delivered. Raises as `Transaction.commit`."""
        _end(self._client, transaction_calls.handle_of_open(transaction), commit=True, from_check=True)

    def rollback(self, transaction: OpenTransaction) -> None:
        """Have the message never delivered. Raises as `Transaction.commit`."""
        _end(self._client, transaction_calls.handle_of_open(transaction), commit=False, from_check=True)

    def check(self, *transactions: OpenTransaction) -> int:
        """Have producers asked now, which counts as a check. How many of them are open."""
        places = [transaction_calls.handle_of_open(each).physical_offset for each in transactions]
        return self._client.run(transaction_calls.check(places)) if places else 0
