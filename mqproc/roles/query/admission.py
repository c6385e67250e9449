"""Admission of long read requests: a limited number per client, others wait.

A partial result stays in memory until the answer is complete, so a client that sends a thousand such requests must not
have a thousand partial answers. Most requests end with their first slice, which does not wait; other clients and other
operations are not affected.
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

LIMITED_OPERATIONS: Final = frozenset({Operation.BY_KEY, Operation.RANGE, Operation.SCAN})
WAITING_MAX: Final = 4096
"""Waiting requests of one client; further ones are refused with STORE_BUSY."""
_HINT_MS: Final = 100


T = TypeVar("T", bound=PendingRequest)


@dataclass(slots=True)
class Job(Generic[T]):
    """A read request under way; `counted` is set by ReadAdmission."""

    request: T
    slices: Slices[Reply]
    counted: bool = False


class ReadAdmission(Generic[T]):
    """Number of requests under way per client, and those that wait for one of them to end."""

    def __init__(self, most: int) -> None:
        """`most` is the number of requests of a client at once."""
        self._most = most
        self._under_way: Counter[ServerConnection] = Counter()
        self._waiting: dict[ServerConnection, deque[T]] = {}

    @classmethod
    def by(cls, options: config.Options) -> Self:
        """Limit from the options: as many complete answers as may be queued for a client."""
        return cls(max(1, options.client_output_bytes // options.max_pull_bytes))

    def __len__(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    def is_waiting(self, request: T) -> bool:
        """Whether a request that was just started waits and will be started again."""
        waiting = self._waiting.get(request.connection)
        return waiting is not None and waiting[-1] is request

    def admit(self, job: Job[T]) -> bool:
        """Whether a request that did not end with its first slice may continue now.

        Otherwise its partial result is dropped and it waits until `finish` returns it, to be started again. Raises
        StoreBusyError.
        """
        connection = job.request.connection
        if job.counted or job.request.operation not in LIMITED_OPERATIONS:
            return True
        if self._under_way[connection] < self._most:
            self._under_way[connection] += 1
            job.counted = True
            return True
        job.slices.close()
        waiting = self._waiting.setdefault(connection, deque())
        if len(waiting) >= WAITING_MAX:
            raise StoreBusyError(f"{WAITING_MAX:,} requests of this client wait already", hint_ms=_HINT_MS)
        waiting.append(job.request)
        return False

    def finish(self, job: Job[T]) -> T | None:
        """Note that a request has ended; returns the client's next waiting one if it may start."""
        connection = job.request.connection
        if job.counted and connection in self._under_way:
            self._under_way[connection] -= 1
            if not self._under_way[connection]:
                del self._under_way[connection]
        elif job.request.operation not in LIMITED_OPERATIONS or self._under_way[connection] >= self._most:
            # With room, this request had waited itself and ended with its first slice when started again, as when its
            # topic is gone: others may wait after it.
            return None
        waiting = self._waiting.get(connection)
        if waiting is None:
            return None
        next_request = waiting.popleft()
        if not waiting:
            del self._waiting[connection]
        return next_request

    def drop(self, connection: ServerConnection) -> None:
        """Forget a closed connection."""
        self._under_way.pop(connection, None)
        self._waiting.pop(connection, None)
