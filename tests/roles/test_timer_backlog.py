"""How often the timer looks at a dispatch that is late."""

from __future__ import annotations

import errno

from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.roles.keeper.slots import LATE_MS, LATE_POLL_NS, POLL_NS, TimerBacklog

NOW_MS = 1_700_000_000_000


def test_a_dispatch_that_stays_late_is_looked_at_less_often() -> None:
    """On a full disk, and while a dispatcher hung, the keeper looked 500 times a second."""
    words = Words(bytearray(words_of.FILE_SIZE))
    words[words_of.WRITTEN] = 1
    backlog = TimerBacklog(words)
    backlog.update(backlog.check_dispatch(NOW_MS), 0, 0, NOW_MS)
    assert backlog.poll_ns(0, NOW_MS) == LATE_POLL_NS
    assert backlog.poll_ns(0, NOW_MS + LATE_MS) == POLL_NS
    words[words_of.DISPATCH_ERRNO] = errno.ENOSPC
    assert backlog.poll_ns(0, NOW_MS) == POLL_NS
    words[words_of.DISPATCHED] = 1
    assert backlog.poll_ns(0, NOW_MS) == 0
