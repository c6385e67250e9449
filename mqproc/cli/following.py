"""What comes to a topic's queues from now on: threads wait for it at the server, also for queues that are added."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mqproc.client import Client
from mqproc.errors import MqprocError
from mqproc.message import Filter, PullResult, StoredMessage

_PAGE_MESSAGES = 256
_FOLLOWERS_MAX = 64
_LONG_POLL_S = 5.0
_POLL_S = 0.1
_ORDER_S = 0.01
_LOOK_S: Final = 1.0


@dataclass(slots=True)
class Place:
    """Where one queue is to be read next."""

    queue_id: int
    offset: int


class Following:
    """Messages of a topic's queues as they come. An error of any thread is raised by who takes the messages."""

    def __init__(
        self,
        client: Client,
        topic: str,
        chosen: Filter | None,
        tell_damage: Callable[[int, PullResult], None],
        note: Callable[[str], None],
    ) -> None:
        self._client = client
        self._topic = topic
        self._filter = chosen
        self._tell_damage = tell_damage
        self._note = note
        self._found: queue.Queue[Sequence[StoredMessage] | MqprocError] = queue.Queue(_FOLLOWERS_MAX)
        # What each thread reads: one queue, or several when there are many.
        self._shares: list[list[Place]] = []
        self._known: set[int] = set()

    def messages(self, places: Sequence[Place], *, added_too: bool, ends_s: float) -> Iterator[StoredMessage]:
        """What comes to the queues from these places on, until `ends_s` of the monotonic clock.

        `added_too`: and to each queue that is added, all it has.
        """
        for place in places:
            self._add(place)
        threading.Thread(target=self._look, args=(added_too,), daemon=True).start()
        while (some := self._next(ends_s)) is not None:
            if isinstance(some, MqprocError):
                raise some
            if len(self._known) > 1:
                time.sleep(_ORDER_S)
            # Messages of several queues that come within this time are put into the log's order.
            yield from sorted(itertools.chain(some, self._waiting()), key=lambda message: message.physical_offset)

    def _next(self, ends_s: float) -> Sequence[StoredMessage] | MqprocError | None:
        """What was found first, once there is something; None at the end."""
        try:
            return self._found.get(timeout=min(max(0.0, ends_s - time.monotonic()), threading.TIMEOUT_MAX))
        except queue.Empty:
            return None

    def _add(self, place: Place) -> None:
        number = len(self._known)
        self._known.add(place.queue_id)
        if number >= _FOLLOWERS_MAX:
            self._shares[number % _FOLLOWERS_MAX].append(place)
            return
        self._shares.append([place])
        threading.Thread(target=self._watch, args=(self._shares[-1],), daemon=True).start()

    def _look(self, added_too: bool) -> None:
        """Find queues that are added, and tell of a topic that is deleted: it may be made again."""
        there = True
        while True:
            time.sleep(_LOOK_S)
            try:
                infos = self._client.queues(self._topic)
            except MqprocError as error:
                self._found.put(error)
                return
            if there and not infos:
                self._note(f"topic {self._topic} is deleted; what comes follows if it is made again")
            there = bool(infos)
            for info in infos:
                if added_too and info.queue_id not in self._known:
                    self._add(Place(info.queue_id, info.min_offset))

    def _watch(self, share: list[Place]) -> None:
        while True:
            wait_s = _LONG_POLL_S if len(share) == 1 else 0.0
            began_s = time.monotonic()
            moved = False
            for place in share:
                try:
                    pulled = self._client.pull(
                        self._topic, place.queue_id, place.offset, _PAGE_MESSAGES, filter=self._filter, timeout=wait_s
                    )
                except MqprocError as error:
                    self._found.put(error)
                    return
                self._tell_damage(place.queue_id, pulled)
                moved = moved or pulled.next_offset > place.offset
                place.offset = max(place.offset, pulled.next_offset)
                if pulled.messages:
                    self._found.put(pulled.messages)
            # A pull is answered at once where its queue is gone, or ends below the place.
            if not moved and (not wait_s or time.monotonic() - began_s < _POLL_S):
                time.sleep(_POLL_S)

    def _waiting(self) -> Iterable[StoredMessage]:
        """What lies in the queue now; an error is put back for the next turn."""
        while True:
            try:
                some = self._found.get_nowait()
            except queue.Empty:
                return
            if isinstance(some, MqprocError):
                self._found.put(some)
                return
            yield from some
