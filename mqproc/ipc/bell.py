"""Doorbells: they only say "look again". What is true stands in the control file.

A ringer publishes, fences, looks at the listener's `sleeping` word and posts only if it is set. A listener drains, sets
`sleeping`, fences, looks for work again, waits at most MAX_WAIT_S and clears `sleeping`. A lost or an extra post
therefore does no harm. Posts are drained before a wait and not behind it: what the listener was woken for comes first.

    ringer      bell.publish(index, value)           or: stores of its own, then bell.ring()
    listener    bell.announce(); look again; bell.wait(seconds); bell.awake()

A listener may also lie low for a moment, `bell.lie_low()` in place of `announce`: then only who `hurry`s wakes it.

`SemaphoreBell` is the cheaper one for a role that waits for nothing else; `EventBell` has a descriptor that stands in
an epoll beside sockets, and waits by the monotonic clock.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import select

import numpy as np
import posix_ipc
from numpy.typing import NDArray

from mqproc.kernels.fences import fence_and_peek, publish_and_peek

MAX_WAIT_S = 1.0
"""Every wait ends by itself: `sem_timedwait` goes by the wall clock, and a bell rung by nobody must not be the end."""

# What `sleeping` says.
AWAKE, ASLEEP, LYING_LOW = range(3)

_MOST_POSTS_DRAINED = 1 << 16
# Where the C library keeps semaphores with names, and what it puts before them.
FOLDER = "/dev/shm"
_FILE_PREFIX = "sem."


class Bell(abc.ABC):
    """One listener's bell, bound to the word that says whether it sleeps."""

    def __init__(self, cells: NDArray[np.int64], sleeping_index: int) -> None:
        self._cells = cells
        self._sleeping_index = sleeping_index

    # Ringer

    def publish(self, index: int, value: int) -> None:
        """Store a word of the ringer's own, then ring: one compiled call when the listener is awake."""
        if publish_and_peek(self._cells, index, value, self._sleeping_index) == ASLEEP:
            self.post()

    def ring(self) -> None:
        """Wake the listener if it sleeps. What it is to see has been stored before."""
        if fence_and_peek(self._cells, self._sleeping_index) == ASLEEP:
            self.post()

    def hurry(self) -> None:
        """Wake the listener if it lies low: somebody waits for what it does. Who has been stored before."""
        if fence_and_peek(self._cells, self._sleeping_index) == LYING_LOW:
            self.post()

    @abc.abstractmethod
    def post(self) -> None:
        """Wake the listener whether it sleeps or not."""

    def fileno(self) -> int:
        """For an epoll, readable once the bell was rung. Only an EventBell has one."""
        raise TypeError(f"a {type(self).__name__} has no descriptor: give the role BellKind.EVENT")

    # Listener

    def announce(self) -> None:
        """Forget the posts so far and say that a wait comes; after this look for work once more."""
        self.drain()
        publish_and_peek(self._cells, self._sleeping_index, ASLEEP, self._sleeping_index)

    def lie_low(self) -> None:
        """As `announce`, of a short wait that only who hurries ends; after this look once more whether anybody does."""
        self.drain()
        publish_and_peek(self._cells, self._sleeping_index, LYING_LOW, self._sleeping_index)

    @abc.abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Sleep until a post, a signal, or `timeout_s` (at most MAX_WAIT_S) has passed; whether a post was the end."""

    def awake(self) -> None:
        """Say that the wait is over."""
        self._cells[self._sleeping_index] = AWAKE

    @abc.abstractmethod
    def drain(self) -> None:
        """Forget all posts."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of this process's handle."""


class SemaphoreBell(Bell):
    """A POSIX semaphore. Its name ends with `unlink`; the handle goes on, here and in forked processes."""

    def __init__(self, name: str, cells: NDArray[np.int64], sleeping_index: int) -> None:
        super().__init__(cells, sleeping_index)
        self._semaphore = _new_semaphore(name)

    def unlink(self) -> None:
        """Remove the name, if it is still there: done as soon as those who need the handle can inherit it."""
        with contextlib.suppress(posix_ipc.ExistentialError):
            self._semaphore.unlink()

    def post(self) -> None:
        # EOVERFLOW: 2³¹−1 posts wait already.
        with contextlib.suppress(OSError):
            self._semaphore.release()

    def wait(self, timeout_s: float) -> bool:
        with contextlib.suppress(posix_ipc.BusyError, posix_ipc.SignalError):
            self._semaphore.acquire(_bounded(timeout_s))
            return True
        return False

    def drain(self) -> None:
        with contextlib.suppress(posix_ipc.BusyError, posix_ipc.SignalError):
            for _ in range(_MOST_POSTS_DRAINED):
                if self._semaphore.value == 0:
                    return
                self._semaphore.acquire(0)

    def close(self) -> None:
        self._semaphore.close()


class EventBell(Bell):
    """An eventfd, for a role that waits for sockets too."""

    def __init__(self, cells: NDArray[np.int64], sleeping_index: int) -> None:
        super().__init__(cells, sleeping_index)
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def fileno(self) -> int:
        return self._fd

    def post(self) -> None:
        # The counter is full: the listener has been rung 2⁶⁴−2 times and did not drain.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float) -> bool:
        return bool(self._poll.poll(_bounded(timeout_s) * 1000))

    def drain(self) -> None:
        # Most often there is none: to ask costs less than an error. Nobody else reads.
        if self._poll.poll(0):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def warm() -> None:
    """Load what bells call of compiled code, so that forked processes find it ready."""
    cells = np.zeros(1, np.int64)
    publish_and_peek(cells, 0, 0, 0)
    fence_and_peek(cells, 0)


def semaphore_name(store_id: int, epoch: int, role_number: int) -> str:
    """A semaphore's name: hex digits only, never anything that a user typed."""
    return f"/{store_id:016x}{epoch:08x}{role_number:02x}"


def names_of(store_id: int) -> list[str]:
    """Names of all semaphores of a store that there are, of whatever epoch."""
    try:
        found = os.listdir(FOLDER)
    except FileNotFoundError:
        return []
    prefix = f"{_FILE_PREFIX}{store_id:016x}"
    return sorted(f"/{name.removeprefix(_FILE_PREFIX)}" for name in found if name.startswith(prefix))


def _new_semaphore(name: str) -> posix_ipc.Semaphore:
    """Raises OSError that names the folder: who is told of no room, and not where, looks at the store's disk."""
    try:
        # Exclusive: a left-over of the same name would keep its old value and mode.
        return posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=0)
    except posix_ipc.PermissionsError:
        number = errno.EACCES
    except posix_ipc.ExistentialError:
        if os.path.isdir(FOLDER):
            raise
        number = errno.ENOENT
    except OSError as error:
        number = error.errno or errno.EIO
    what = f"{os.strerror(number)}; the group's semaphores lie there, mqproc doctor tells what they need"
    raise OSError(number, what, FOLDER)


def unlink_semaphore(name: str) -> None:
    """Remove a name that a killed supervisor left, if it is there."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_semaphore(name)


def _bounded(timeout_s: float) -> float:
    # Written so that NaN, which sem_timedwait takes for a semaphore that does not exist, becomes 0.
    return min(timeout_s, MAX_WAIT_S) if timeout_s > 0 else 0.0
