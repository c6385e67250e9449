"""Members of a group in processes of their own, one or several in each, which do what they are told.

A process has members of the synchronous client, or those of asyncio's.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from mqproc import AsyncClient, Client
from mqproc.client._async.consumer import AsyncConsumer
from mqproc.client._sync.consumer import Consumer
from mqproc.types import StoredMessage

SESSION_S = 1.0
LOOK_S = 0.05
PATIENCE_S = 60.0
"""A call outlasts the next start of whatever was killed."""
Place = tuple[str, int, int]
"""Topic, queue id, queue offset."""
Seen = tuple[Place, bytes]


C = TypeVar("C", Consumer, AsyncConsumer)


class _Member(Generic[C]):
    """What members of both clients have."""

    def __init__(self, consumer: C, ordered: bool) -> None:
        self._consumer = consumer
        self._ordered = ordered
        self._held: dict[Place, StoredMessage] = {}
        self._given: StoredMessage | None = None

    def joined(self) -> str:
        return self._consumer.member_id

    def ack(self, places: Iterable[Place]) -> Awaitable[None] | None:
        return self._consumer.ack(*map(self._held.pop, places))

    def _took(self, found: list[StoredMessage]) -> list[Seen]:
        self._held |= {_place(message): message for message in found}
        return _seen(found)


class Served(_Member[Consumer]):
    """One member in its process; what it can be told."""

    def __init__(self, consumer: Consumer, ordered: bool) -> None:
        super().__init__(consumer.__enter__(), ordered)
        self._loop: Iterator[StoredMessage] | None = None

    def receive(self, count: int) -> list[Seen]:
        return self._took(self._consumer.receive(count, LOOK_S, ordered=self._ordered))

    def iterate(self, count: int) -> tuple[list[Seen], bool]:
        """Go on with the loop, or begin one: what came, and whether the loop is over, so that all of it is done."""
        found: list[StoredMessage] = []
        while len(found) < count:
            self._loop = self._loop or self._consumer.messages(LOOK_S)
            message = next(self._loop, None)
            if message is None:
                self._loop = None
                break
            found.append(message)
            self._given = message
        return _seen(found), self._loop is None

    def break_off(self) -> None:
        """Leave the loop with a message that is not done."""
        self._loop = None

    def first(self) -> list[Seen]:
        """Loop over the consumer itself, which ends never, and leave that at once."""
        for message in self._consumer:
            return _seen([message])
        raise AssertionError("the loop has ended")

    def nack(self, places: Iterable[Place]) -> None:
        self._consumer.nack(*map(self._held.pop, places), delay_level=1)

    def nack_given(self) -> None:
        """What the loop has given comes again later too."""
        assert self._given is not None
        self._consumer.nack(self._given, delay_level=1)

    def commit(self) -> None:
        self._consumer.commit()

    def leave(self) -> None:
        """As at the end of a `with` block: what the loop has given is done."""
        self._consumer.__exit__(None, None, None)


class AsyncServed(_Member[AsyncConsumer]):
    """The same of asyncio's client."""

    def __init__(self, consumer: AsyncConsumer, ordered: bool) -> None:
        super().__init__(consumer, ordered)
        self._loop: AsyncGenerator[StoredMessage] | None = None

    async def receive(self, count: int) -> list[Seen]:
        return self._took(await self._consumer.receive(count, LOOK_S, ordered=self._ordered))

    async def iterate(self, count: int) -> tuple[list[Seen], bool]:
        found: list[StoredMessage] = []
        while len(found) < count:
            self._loop = self._loop or _generator(self._consumer.messages(LOOK_S))
            message = await anext(self._loop, None)
            if message is None:
                self._loop = None
                break
            found.append(message)
            self._given = message
        return _seen(found), self._loop is None

    async def break_off(self) -> None:
        if self._loop is not None:
            await self._loop.aclose()
        self._loop = None

    async def first(self) -> list[Seen]:
        async with contextlib.aclosing(_generator(aiter(self._consumer))) as loop:
            return _seen([await anext(loop)])

    async def nack(self, places: Iterable[Place]) -> None:
        await self._consumer.nack(*map(self._held.pop, places), delay_level=1)

    async def nack_given(self) -> None:
        assert self._given is not None
        await self._consumer.nack(self._given, delay_level=1)

    async def commit(self) -> None:
        await self._consumer.commit()

    async def leave(self) -> None:
        await self._consumer.__aexit__(None, None, None)


def _generator(loop: Any) -> AsyncGenerator[StoredMessage]:
    return cast("AsyncGenerator[StoredMessage]", loop)


def _place(message: StoredMessage) -> Place:
    return message.topic, message.queue_id, message.queue_offset


def _seen(messages: Iterable[StoredMessage]) -> list[Seen]:
    return [(_place(message), message.body) for message in messages]


def serve(store: Path, group: str, topic: str, ordered: bool, pipe: Connection) -> None:
    """The process: (number of a member, what, arguments) → answer. Its members share one client."""
    members: dict[int, Served] = {}
    with Client(store, timeout=PATIENCE_S) as client:
        while True:
            number, what, arguments = pipe.recv()
            if number not in members:
                consumer = client.consumer(
                    group, topic, start="earliest", session_timeout=SESSION_S, pull_messages=8, name=f"m{number}"
                )
                members[number] = Served(consumer, ordered)
            pipe.send(getattr(members[number], what)(*arguments))
            if what == "leave":
                del members[number]


def serve_async(store: Path, group: str, topic: str, ordered: bool, pipe: Connection) -> None:
    """The same with asyncio's client."""
    asyncio.run(_serve_async(store, group, topic, ordered, pipe))


async def _serve_async(store: Path, group: str, topic: str, ordered: bool, pipe: Connection) -> None:
    members: dict[int, AsyncServed] = {}
    async with AsyncClient(store, timeout=PATIENCE_S) as client:
        while True:
            number, what, arguments = await asyncio.to_thread(pipe.recv)
            if number not in members:
                consumer = await client.consumer(
                    group, topic, start="earliest", session_timeout=SESSION_S, pull_messages=8, name=f"a{number}"
                )
                members[number] = AsyncServed(await consumer.__aenter__(), ordered)
            answer = getattr(members[number], what)(*arguments)
            pipe.send(await answer if inspect.isawaitable(answer) else answer)
            if what == "leave":
                del members[number]


class Host:
    """The test's end of a process."""

    def __init__(self, store: Path, group: str, topic: str, *, ordered: bool, is_async: bool) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        target = serve_async if is_async else serve
        self.process = context.Process(target=target, args=(store, group, topic, ordered, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, number: int, what: str, *arguments: Any) -> Any:
        self._pipe.send((number, what, arguments))
        assert self._pipe.poll(2 * PATIENCE_S), "a member does not answer"
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)
        self._pipe.close()


@dataclass(eq=False)
class Member:
    """The test's end of a member."""

    host: Host
    number: int
    member_id: str = ""
    held: list[Seen] = field(default_factory=list)
    """What it has received and not acknowledged."""
    in_loop: Seen | None = None
    """What its loop has given and was not asked to go on from."""
    is_nacked: bool = False
    """Whether that was nacked."""
    left: list[Seen] = field(default_factory=list)
    """What loops had given when they were left: it comes again, or is done when the member leaves."""

    def __post_init__(self) -> None:
        self.member_id = self.ask("joined")

    def ask(self, what: str, *arguments: Any) -> Any:
        return self.host.ask(self.number, what, *arguments)
