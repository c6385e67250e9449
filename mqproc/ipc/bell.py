"""Doorbells that wake a role when another process has published something.

A bell only means "check again"; the state itself is in the control file. The ringer publishes, fences, reads the
listener's `sleeping` word, and posts only if it is set. The listener drains, sets `sleeping`, fences, checks for work,
waits at most MAX_WAIT_S and clears `sleeping`. So lost and extra posts are harmless. Posts are drained before a wait
rather than after it: the work that the listener was woken for comes first.

    ringer      bell.publish(index, value)           or: stores of its own, then bell.ring()
    listener    bell.announce(); check for work; bell.wait(seconds); bell.awake()

A listener may also linger, `bell.linger()` instead of `announce`: then only `expedite` wakes it.

`SemaphoreBell` is cheaper, for a role that waits for nothing else; `EventBell` has a descriptor for an epoll with
sockets, and waits by the monotonic clock.
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

from mqproc.kernels.jit.intrinsics import fence_and_peek, publish_and_peek

MAX_WAIT_S = 1.0
"""Limit of each wait: `sem_timedwait` uses the wall clock, and a lost ring must not block forever."""

# Values of the `sleeping` word.
AWAKE, ASLEEP, LINGERING = range(3)

_DRAINED_POSTS_MAX = 1 << 16
# Where the C library keeps named semaphores, and its prefix of their names.
SEMAPHORE_FOLDER = "/dev/shm"
_FILE_PREFIX = "sem."


class Bell(abc.ABC):
    """A listener's bell, bound to the word that says whether it sleeps."""

    def __init__(self, cells: NDArray[np.int64], sleeping_index: int) -> None:
        self._cells = cells
        self._sleeping_index = sleeping_index

    # Ringer side

    def publish(self, index: int, value: int) -> None:
        """Store a word that the ringer owns, then ring: one compiled call if the listener is awake."""
        if publish_and_peek(self._cells, index, value, self._sleeping_index) == ASLEEP:
            self.post()

    def ring(self) -> None:
        """Wake the listener if it sleeps. Publish state before the call."""
        if fence_and_peek(self._cells, self._sleeping_index) == ASLEEP:
            self.post()

    def expedite(self) -> None:
        """Wake a lingering listener, since a client waits for its work. Publish before the call."""
        if fence_and_peek(self._cells, self._sleeping_index) == LINGERING:
            self.post()

    @abc.abstractmethod
    def post(self) -> None:
        """Wake the listener unconditionally."""

    def fileno(self) -> int:
        """A descriptor for epoll, readable after a ring. Only an EventBell has one."""
        raise TypeError(f"a {type(self).__name__} has no descriptor: use BellKind.EVENT for the role")

    # Listener side

    def announce(self) -> None:
        """Discard earlier posts and announce a wait; check for work once more afterwards."""
        self.drain()
        publish_and_peek(self._cells, self._sleeping_index, ASLEEP, self._sleeping_index)

    def linger(self) -> None:
        """Announce a short wait that only `expedite` ends; check once more for waiting clients."""
        self.drain()
        publish_and_peek(self._cells, self._sleeping_index, LINGERING, self._sleeping_index)

    @abc.abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Sleep until a post, a signal, or `timeout_s` (at most MAX_WAIT_S); return whether posted."""

    def awake(self) -> None:
        """End the announced wait."""
        self._cells[self._sleeping_index] = AWAKE

    @abc.abstractmethod
    def drain(self) -> None:
        """Discard all posts."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close this process's handle."""


class SemaphoreBell(Bell):
    """A POSIX semaphore. After `unlink` the handle remains valid, also in forked processes."""

    def __init__(self, name: str, cells: NDArray[np.int64], sleeping_index: int) -> None:
        super().__init__(cells, sleeping_index)
        self._semaphore = _new_semaphore(name)

    def unlink(self) -> None:
        """Remove the name, once every process that needs the handle can inherit it."""
        with contextlib.suppress(posix_ipc.ExistentialError):
            self._semaphore.unlink()

    def post(self) -> None:
        # EOVERFLOW: 2³¹−1 posts are pending.
        with contextlib.suppress(OSError):
            self._semaphore.release()

    def wait(self, timeout_s: float) -> bool:
        with contextlib.suppress(posix_ipc.BusyError, posix_ipc.SignalError):
            self._semaphore.acquire(_limit_timeout(timeout_s))
            return True
        return False

    def drain(self) -> None:
        with contextlib.suppress(posix_ipc.BusyError, posix_ipc.SignalError):
            for _ in range(_DRAINED_POSTS_MAX):
                if self._semaphore.value == 0:
                    return
                self._semaphore.acquire(0)

    def close(self) -> None:
        self._semaphore.close()


class EventBell(Bell):
    """An eventfd, for a role that also waits for sockets."""

    def __init__(self, cells: NDArray[np.int64], sleeping_index: int) -> None:
        super().__init__(cells, sleeping_index)
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def fileno(self) -> int:
        return self._fd

    def post(self) -> None:
        # The counter is full: 2⁶⁴−2 rings without a drain.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float) -> bool:
        return bool(self._poll.poll(_limit_timeout(timeout_s) * 1000))

    def drain(self) -> None:
        # Usually there is no post: polling costs less than an exception. There is no other reader.
        if self._poll.poll(0):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def warm() -> None:
    """Load the compiled code of bells, so that forked processes find it ready."""
    cells = np.zeros(1, np.int64)
    publish_and_peek(cells, 0, 0, 0)
    fence_and_peek(cells, 0)


def semaphore_name(store_id: int, epoch: int, role_number: int) -> str:
    """Name of a role's semaphore: hex digits only, no user input."""
    return f"/{store_id:016x}{epoch:08x}{role_number:02x}"


def semaphore_names(store_id: int) -> list[str]:
    """Names of all existing semaphores of a store, of any epoch."""
    try:
        names = os.listdir(SEMAPHORE_FOLDER)
    except FileNotFoundError:
        return []
    prefix = f"{_FILE_PREFIX}{store_id:016x}"
    return sorted(f"/{name.removeprefix(_FILE_PREFIX)}" for name in names if name.startswith(prefix))


def _new_semaphore(name: str) -> posix_ipc.Semaphore:
    """Create a semaphore. Errors name its folder: a full /dev/shm would look like a full disk."""
    try:
        # Exclusive: a leftover of the same name would keep its value and mode.
        return posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=0)
    except posix_ipc.PermissionsError:
        number = errno.EACCES
    except posix_ipc.ExistentialError:
        if os.path.isdir(SEMAPHORE_FOLDER):
            raise
        number = errno.ENOENT
    except OSError as error:
        number = error.errno or errno.EIO
    what = f"{os.strerror(number)}; the group's semaphores are files there; see mqproc doctor"
    raise OSError(number, what, SEMAPHORE_FOLDER)


def unlink_semaphore(name: str) -> None:
    """Remove the name that a killed supervisor left, if it exists."""
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_semaphore(name)


def _limit_timeout(timeout_s: float) -> float:
    # Maps NaN to 0: sem_timedwait would report a missing semaphore for it.
    return min(timeout_s, MAX_WAIT_S) if timeout_s > 0 else 0.0
