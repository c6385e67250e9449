"""Which descriptor wakes the supervisor, and what it then calls."""

from __future__ import annotations

import select
from collections.abc import Callable


class Reactor:
    """An epoll with a handler for each descriptor. It can itself stand in another epoll."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def fileno(self) -> int:
        """Readable while any watched descriptor is."""
        return self._epoll.fileno()

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `fd` is readable."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def forget(self, fd: int) -> None:
        """No more; to be called before `fd` is closed, since a forked child may still have a copy."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def dispatch(self) -> None:
        """Call the handlers of what is readable now. A handler may watch and forget."""
        for fd, _ in self._epoll.poll(0):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()

    def close(self) -> None:
        self._epoll.close()
