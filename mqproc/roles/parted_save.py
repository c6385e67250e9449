"""A file that is saved in parts, each of which waits for the disk: what is due meanwhile goes in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from mqproc.ipc.clock import Clock

INTERVAL_NS: Final = 5_000_000_000


class PartedSave:
    """`steps` makes the parts of one save; with 0 it waits for what the flushers make durable.

    `failed` is told of the OSError that ended one.
    """

    def __init__(
        self,
        clock: Clock,
        steps: Callable[[int], Iterator[None]],
        failed: Callable[[OSError], None],
    ) -> None:
        self._clock = clock
        self._steps = steps
        self._failed = failed
        self._left: Iterator[None] | None = None
        self.due_ns = 0
        """When the next save may begin."""

    @property
    def under_way(self) -> bool:
        """Whether parts of a save are left."""
        return self._left is not None

    def go_on(self) -> None:
        """Do the next part, of a new save when none is under way."""
        if self._left is None:
            self.due_ns = self._clock.monotonic_ns() + INTERVAL_NS
            self._left = self._steps(0)
        self._part(self._left)

    def whole(self, durable: int) -> None:
        """Save from the beginning to the end; the log is durable up to `durable`."""
        self._left = self._steps(durable)
        while self._left is not None:
            self._part(self._left)

    def _part(self, left: Iterator[None]) -> None:
        try:
            next(left)
        except StopIteration:
            self._left = None
        except OSError as error:
            self._left = None
            self._failed(error)
