"""Transactions: a message that is stored now and delivered when its producer commits.

transaction ──half message──▶ the producer's own work ──commit──▶ delivered
                                      └──rollback, or an exception──▶ never delivered
                                      └──the producer dies──▶ another producer of its group is asked
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Self

from mqproc.client import transaction_requests
from mqproc.client._async.background import AsyncBackground, is_cancelled
from mqproc.client.codecs import encoded
from mqproc.client.connection import ClientPart
from mqproc.client.message_fields import plain_text
from mqproc.client.requests import QUERY
from mqproc.client.retry import ConnectionLost, OutageLog
from mqproc.client.transaction_requests import POLL_S, Handle, TransactionOutcome
from mqproc.errors import BadRequestError, MqprocError, PermissionDeniedError
from mqproc.topic_names import check_group
from mqproc.types import Message, OpenTransaction, StoredMessage, TransactionResolution

if TYPE_CHECKING:
    from mqproc.client._async.connection import AsyncConnections, MultiplexedConnection

Decision = TransactionResolution | bool | None
_Result = Decision | Awaitable[Decision]  # sync: _Result = Decision
AsyncChecker = Callable[[StoredMessage], _Result]
"""Decides the transaction of a message: True commits it, False rolls it back, None leaves it open. A checker of an
asynchronous producer may be a coroutine function."""
_log = logging.getLogger("mqproc.transactions")


class AsyncTransaction(TransactionOutcome):
    """One message and its outcome, made by `AsyncClient.transaction`.

        async with client.transaction("billing", Message("orders", b"paid")) as transaction:
            await database.execute("INSERT …", transaction.transaction_id)

    The half message is stored when the block begins. Its end commits, an exception rolls back, unless the transaction
    was decided before. Not for several threads or tasks at once.
    """

    def __init__(self, client: AsyncConnections, half: Message) -> None:
        super().__init__(half)
        self._client = client

    async def begin(self) -> Self:
        """Store the half message, once. Raises as `AsyncClient.send`.

        After a lost answer a check decides. Example: `await transaction.begin()`
        """
        if self._sent is None:
            self._sent = await self._client.run(transaction_requests.send_half(self._half))
        return self

    async def commit(self) -> None:
        """Have the message delivered; does nothing when it was committed already.

        Raises TransactionEndedError when it was rolled back or given up, TransactionOverdueError when its own
        `check_immunity_time` is over, SendOutcomeUnknownError when the answer was lost: then a check decides.
        Example: `await transaction.commit()`
        """
        await self._end(TransactionResolution.COMMIT)

    async def rollback(self) -> None:
        """Discard the message. Raises as `commit`. Example: `await transaction.rollback()`"""
        await self._end(TransactionResolution.ROLLBACK)

    async def _end(self, resolution: TransactionResolution) -> None:
        await _end(self._client, self._handle(resolution), commit=resolution is TransactionResolution.COMMIT)
        self.resolution = resolution

    async def __aenter__(self) -> Self:
        return await self.begin()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._is_decided:
            return
        if error is None:
            await self.commit()
            return
        try:
            await self.rollback()
        except MqprocError as failure:
            error.add_note(f"the rollback of transaction {self.transaction_id} failed: {failure}")


async def _end(client: AsyncConnections, handle: Handle, *, commit: bool, from_check: bool = False) -> None:
    with transaction_requests.unknown_outcome(handle, commit=commit):
        await client.run(transaction_requests.end(handle, commit=commit, from_check=from_check))


class AsyncTransactionProducer(ClientPart):
    """A producer of a group that answers checks of the group's transactions.

        async with client.transaction_producer("billing", lambda message: paid(message.keys[0])) as producer:
            async with producer.transaction(Message("orders", b"paid", keys=["order-1"])):
                await pay("order-1")

    It waits for checks in the background and calls `checker` with one message at a time. An exception of the checker is
    logged, and the check is repeated later.
    """

    def __init__(self, client: AsyncConnections, group: str, checker: AsyncChecker) -> None:
        check_group(group)
        transaction_requests.check_checker(checker)
        self._client = client
        self.group = plain_text(group)
        self._checker = checker
        self._connection: MultiplexedConnection | None = None
        self.failure: MqprocError | None = None
        """Why it can no longer be asked; None while it can."""
        self._background = AsyncBackground("mqproc-transactions", self._run)
        # sync: self._background.start()

    def transaction(self, message: Message, *, check_immunity_time: int | None = None) -> AsyncTransaction:
        """Make a transaction of this group; see `AsyncClient.transaction`.

        Raises the error that ended the producer.
        Example: `transaction = producer.transaction(Message("orders", b"paid"))`
        """
        if self.failure is not None:
            raise self.failure
        if self._client._codec is not None:
            message = encoded(self._client._codec, message)
        half = transaction_requests.half_message(self.group, message, check_immunity_time)
        return AsyncTransaction(self._client, half)

    async def close(self) -> None:
        """Accept no more checks. Open transactions stay open.

        Waits for a checker that does not end, at most for the client's `timeout`. Example: `await producer.close()`
        """
        await self._background.stop(self._client.timeout_s)  # sync: self._background.request_stop()
        # sync: connection = self._connection
        # sync: if connection is not None:
        # sync:     connection.shut_down()
        # sync: self._background.join(self._client.timeout_s)

    async def __aenter__(self) -> Self:
        self._background.start()  # async only
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> None:
        try:
            await self._answer_checks()
        finally:
            self._close_connection()

    async def _answer_checks(self) -> None:
        outage = OutageLog(_log, f"waiting for checks of group {self.group}", self._client.retry)
        while not self._background.stopping:
            began = time.monotonic()
            try:
                for message in await self._poll():
                    await self._resolve(message)
                outage.over()
                continue
            except (BadRequestError, PermissionDeniedError) as error:
                self.failure = error
                return
            except (MqprocError, ConnectionLost) as error:
                pause_s = outage.failed(error, time.monotonic() - began)
            self._close_connection()
            await self._background.pause(pause_s)

    async def _poll(self) -> list[StoredMessage]:
        if self._connection is None:
            self._connection = self._client.take_connection(QUERY)
            if self._background.stopping:  # `close` has not seen this connection, so it would wait for its answer.
                return []
        call = transaction_requests.poll(self.group, POLL_S)
        return await self._connection.ask(call, self._client.deadline_of(call))

    async def _resolve(self, message: StoredMessage) -> None:
        if self._background.stopping:
            return
        try:
            decision = self._checker(message)
            decision = await decision if inspect.isawaitable(decision) else decision  # async only
            resolution = transaction_requests.resolution_of(decision)
        except (Exception, asyncio.CancelledError) as error:  # sync: except BaseException:  # Including sys.exit.
            if isinstance(error, asyncio.CancelledError) and is_cancelled():  # async only
                raise
            _log.warning("checking transaction of message %s failed", message.message_id, exc_info=True)
            return
        if resolution is TransactionResolution.UNKNOWN:
            return
        handle = transaction_requests.handle_of_asked(self.group, message)
        try:
            await _end(self._client, handle, commit=resolution is TransactionResolution.COMMIT, from_check=True)
        except MqprocError as error:
            # It was decided elsewhere meanwhile, or the check is repeated.
            _log.warning("transaction %s was not ended: %s", handle.transaction_id, error)

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class AsyncTransactions(ClientPart):
    """Open transactions: inspection, and decisions in place of their producers.

    Made by the client.

    for transaction in await client.transactions.open("billing"):
        await client.transactions.rollback(transaction)
    """

    def __init__(self, client: AsyncConnections) -> None:
        self._client = client

    async def open(
        self, group: str = "", *, ids: list[str] | None = None, max_transactions: int = 1000
    ) -> list[OpenTransaction]:
        """List the oldest open transactions of a group or of all, optionally by ids.

        An id is a transaction id or a message id. Example: `await client.transactions.open("billing")`
        """
        return await self._client.run(transaction_requests.open_transactions(group, ids or (), max_transactions))

    async def commit(self, transaction: OpenTransaction) -> None:
        """Have the message delivered. Raises as `AsyncTransaction.commit`.

        Example: `await client.transactions.commit(transaction)`
        """
        await _end(self._client, transaction_requests.handle_of_open(transaction), commit=True, from_check=True)

    async def rollback(self, transaction: OpenTransaction) -> None:
        """Discard the message. Raises as `AsyncTransaction.commit`.

        Example: `await client.transactions.rollback(transaction)`
        """
        await _end(self._client, transaction_requests.handle_of_open(transaction), commit=False, from_check=True)

    async def check(self, *transactions: OpenTransaction) -> int:
        """Ask producers now, which counts as a check; returns how many of the transactions are open.

        Example: `await client.transactions.check(transaction)`
        """
        places = [transaction_requests.handle_of_open(each).physical_offset for each in transactions]
        return await self._client.run(transaction_requests.check(places)) if places else 0
