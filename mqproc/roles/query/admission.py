"""Questions whose answers are gathered piece by piece: a client has so many under way at once, its others wait.

What is gathered so far stays in memory until the answer is whole, so a client that asks a thousand such questions
together must not have a thousand answers in the making. Most end with their first slice, which none waits for; other
clients, and all other questions, go on beside it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final, Generic, Self, TypeVar

from mqproc.config import options as config
from mqproc.errors import StoreBusyError
from mqproc.roles.request_limits import PendingRequest, Reply
from mqproc.store.cooperative import Slices
from mqproc.wire.connection import ServerConnection
from mqproc.wire.operations import Operation

GATHERED: Final = frozenset({Operation.BY_KEY, Operation.RANGE, Operation.SCAN})
WAITING_MAX: Final = 4096
"""Questions of one client that wait; further ones are refused for now."""
_HINT_MS: Final = 100


T = TypeVar("T", bound=PendingRequest)


@dataclass(slots=True)
class Job(Generic[T]):
    """A question under way; `counted` is Gathering's."""

    request: T
    slices: Slices[Reply]
    counted: bool = False


class ReadAdmission(Generic[T]):
    """Who has how many questions under way, and which wait for one of the same client to end."""

    def __init__(self, most: int) -> None:
        """`most` questions of a client at once."""
        self._most = most
        self._under_way: Counter[ServerConnection] = Counter()
        self._waiting: dict[ServerConnection, deque[T]] = {}

    @classmethod
    def by(cls, options: config.Options) -> Self:
        """As many as may wait for a client together when they are whole."""
        return cls(max(1, options.client_output_bytes // options.max_pull_bytes))

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    def keeps(self, request: T) -> bool:
        """Whether a question that was just asked waits, and is asked anew."""
        waiting = self._waiting.get(request.connection)
        return waiting is not None and waiting[-1] is request

    def goes_on(self, job: Job[T]) -> bool:
        """Whether a question that has not ended with its first slice goes on now.

        Else what it has found is forgotten and it waits: `ended` gives it back, to be asked anew. Raises
        StoreBusyError.
        """
        connection = job.request.connection
        if job.counted or job.request.operation not in GATHERED:
            return True
        if self._under_way[connection] < self._most:
            self._under_way[connection] += 1
            job.counted = True
            return True
        job.slices.close()
        waiting = self._waiting.setdefault(connection, deque())
        if len(waiting) >= WAITING_MAX:
            raise StoreBusyError(f"{WAITING_MAX:,} questions of this client wait already", hint_ms=_HINT_MS)
        waiting.append(job.request)
        return False

    def ended(self, job: Job[T]) -> T | None:
        """A question has ended; the client's next one, where there is room for that."""
        connection = job.request.connection
        if job.counted and connection in self._under_way:
            self._under_way[connection] -= 1
            if not self._under_way[connection]:
                del self._under_way[connection]
        elif job.request.operation not in GATHERED or self._under_way[connection] >= self._most:
            # Without room none goes on. With room this one has waited itself, and others behind it: asked anew it ended
            # with its first slice, as where its topic is gone.
            return None
        waiting = self._waiting.get(connection)
        if waiting is None:
            return None
        following = waiting.popleft()
        if not waiting:
            del self._waiting[connection]
        return following

    def drop(self, connection: ServerConnection) -> None:
        """Forget a client that is gone."""
        self._under_way.pop(connection, None)
        self._waiting.pop(connection, None)
