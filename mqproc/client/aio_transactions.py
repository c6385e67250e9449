"""Transactions for asyncio: as `transactions`, with a task in the place of the thread."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from mqproc.client import tasks, transaction_calls
from mqproc.client.core import QUERY
from mqproc.client.outage import Outage
from mqproc.client.retry import ConnectionLost
from mqproc.client.transaction_calls import POLL_S, Handle
from mqproc.client.transactions import Begun
from mqproc.errors import (
    BadRequestError,
    MqprocError,
    PermissionDeniedError,
)
from mqproc.message import Message, StoredMessage
from mqproc.store.groups.settings import check_group
from mqproc.transactions import OpenTransaction, TransactionResolution

if TYPE_CHECKING:
    from mqproc.client.aio import AsyncClient
    from mqproc.client.aio_lines import Line

T = TypeVar("T")
Said = TransactionResolution | bool | None
AsyncChecker = Callable[[StoredMessage], Said | Awaitable[Said]]
"""As `transactions.Checker`, or a coroutine function that says the same."""
_log = logging.getLogger("mqproc.transactions")


class AsyncTransaction(Begun):
    """One message and its outcome, made by `AsyncClient.transaction`; see `Transaction`.

    async with client.transaction("billing", Message("orders", b"paid")) as transaction:
        await database.execute("INSERT …", transaction.transaction_id)
    """

    def __init__(self, client: AsyncClient, half: Message) -> None:
        super().__init__(half)
        self._client = client

    async def begin(self) -> Self:
        """Store the half message, once; see `Transaction.begin`."""
        if self._sent is None:
            self._sent = await self._client.run(transaction_calls.send_half(self._half))
        return self

    async def commit(self) -> None:
        """Have the message delivered; see `Transaction.commit`."""
        await self._end(TransactionResolution.COMMIT)

    async def rollback(self) -> None:
        """Have the message never delivered; see `Transaction.commit`."""
        await self._end(TransactionResolution.ROLLBACK)

    async def _end(self, wanted: TransactionResolution) -> None:
        await _end(self._client, self._handle(wanted), commit=wanted is TransactionResolution.COMMIT)
        self.resolution = wanted

    async def __aenter__(self) -> Self:
        return await self.begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_settled:
            return
        if error is None:
            await self.commit()
            return
        try:
            await self.rollback()
        except MqprocError as failure:
            self._note(error, failure)


async def _end(client: AsyncClient, handle: Handle, *, commit: bool, from_check: bool = False) -> None:
    with transaction_calls.telling_unknown(handle, commit=commit):
        await client.run(transaction_calls.end(handle, commit=commit, from_check=from_check))


class AsyncTransactionProducer:
    """A producer of a group that can be asked about the group's transactions; see `TransactionProducer`.

    async with client.transaction_producer("billing", checker) as producer:
        async with producer.transaction(Message("orders", b"paid", keys=["order-1"])):
            await pay("order-1")
    """

    def __init__(self, client: AsyncClient, group: str, checker: AsyncChecker) -> None:
        check_group(group)
        transaction_calls.check_checker(checker)
        self._client = client
        self.group = group
        self._checker = checker
        self._line: Line | None = None
        self.failure: MqprocError | None = None
        """Why it cannot be asked any more, None while it can."""
        self._task: asyncio.Task[None] | None = None

    def transaction(self, message: Message, *, check_immunity_time: int | None = None) -> AsyncTransaction:
        """A transaction of this group. Raises what has ended the producer, if anything has."""
        if self.failure is not None:
            raise self.failure
        return self._client.transaction(self.group, message, check_immunity_time=check_immunity_time)

    async def close(self) -> None:
        """Not be asked any more. Transactions that are open stay so.

        A checker that goes on though it is cancelled is waited for as long as the client's `timeout`.
        """
        task, self._task = self._task, None
        if task is not None:
            await tasks.end(task, self._client.timeout_s)

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self) -> None:
        try:
            await self._answer_checks()
        finally:
            self._let_go()

    async def _answer_checks(self) -> None:
        outage = Outage("mqproc.transactions", f"waiting for checks of group {self.group}", self._client.retry)
        while True:
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
            self._let_go()
            await asyncio.sleep(pause_s)

    async def _poll(self) -> list[StoredMessage]:
        if self._line is None:
            self._line = self._client.new_line(QUERY)
        call = transaction_calls.poll(self.group, POLL_S)
        return await self._line.ask(call, self._client.timeout_s + call.wait_s)

    async def _resolve(self, message: StoredMessage) -> None:
        try:
            said = self._checker(message)
            resolution = transaction_calls.resolution_of(await said if inspect.isawaitable(said) else said)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and tasks.is_cancelled():
                raise
            _log.warning("checking transaction of message %s failed", message.message_id, exc_info=True)
            return
        if resolution is not TransactionResolution.UNKNOWN:
            handle = transaction_calls.handle_of_asked(self.group, message)
            try:
                commit = resolution is TransactionResolution.COMMIT
                await _end(self._client, handle, commit=commit, from_check=True)
            except MqprocError as error:
                # Decided elsewhere meanwhile, or asked about again.
                _log.warning("transaction %s was not ended: %s", handle.transaction_id, error)

    def _let_go(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


class AsyncTransactions:
    """Open transactions: looking at them, and deciding them in the place of their producers; see `Transactions`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def open(
        self, group: str = "", *, ids: list[str] | None = None, max_transactions: int = 1000
    ) -> list[OpenTransaction]:
        """The oldest open transactions; see `Transactions.open`."""
        return await self._client.run(transaction_calls.open_transactions(group, ids or (), max_transactions))

    async def commit(self, transaction: OpenTransaction) -> None:
        """Have the message delivered."""
        await _end(self._client, transaction_calls.handle_of_open(transaction), commit=True, from_check=True)

    async def rollback(self, transaction: OpenTransaction) -> None:
        """Have the message never delivered."""
        await _end(self._client, transaction_calls.handle_of_open(transaction), commit=False, from_check=True)

    async def check(self, *transactions: OpenTransaction) -> int:
        """Have producers asked now, which counts as a check. How many of them are open."""
        places = [transaction_calls.handle_of_open(each).physical_offset for each in transactions]
        return await self._client.run(transaction_calls.check(places)) if places else 0


class AsyncTransactionCalls:
    """`AsyncClient.transaction` and what goes with it."""

    def _client(self) -> AsyncClient:
        from mqproc.client.aio import AsyncClient

        assert isinstance(self, AsyncClient)
        return self

    def transaction(self, group: str, message: Message, *, check_immunity_time: int | None = None) -> AsyncTransaction:
        """A message that is delivered when its transaction commits; see `Client.transaction`."""
        return AsyncTransaction(self._client(), transaction_calls.half_message(group, message, check_immunity_time))

    def transaction_producer(self, group: str, checker: AsyncChecker) -> AsyncTransactionProducer:
        """Be asked about transactions of a producer group; see `Client.transaction_producer`."""
        return AsyncTransactionProducer(self._client(), group, checker)

    @property
    def transactions(self) -> AsyncTransactions:
        """Open transactions: looking at them, and deciding them in the place of their producers."""
        return AsyncTransactions(self._client())
