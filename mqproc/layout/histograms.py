"""Histograms and counts by error code, at the end of the control file: a page for each role, which alone stores there.

    page   │ histograms of the role, one behind the other, counts by error code, the state of a kernel that counts
    histogram, n bounds:   n + 1 counts, each of what was above the bound before and not above its own; the last one
                           of what was above all of them
                           1 sum, in the unit of the bounds

Words are packed, since a page has one owner. Bounds and sums are whole nanoseconds or bytes, so kernels add to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mqproc.errors import ERROR_BY_CODE
from mqproc.layout import control
from mqproc.layout.control import PAGE_SIZE, WORD_SIZE

US = 1_000
MS = 1_000_000
S = 1_000_000_000

REQUEST_BOUNDS_NS = (
    *(50 * US, 100 * US, 250 * US, 500 * US, 1 * MS, 2_500 * US, 5 * MS, 10 * MS),
    *(25 * MS, 50 * MS, 100 * MS, 250 * MS, 500 * MS, 1 * S, 2_500 * MS),
)
# RocketMQ's classes of put times (10, 50, 100, 200, 500 ms, 1, 2, 3, 4, 5, 10 s) are told as far as these tell them.
APPEND_BOUNDS_NS = (*REQUEST_BOUNDS_NS, 5 * S, 10 * S)
FLUSH_BOUNDS_NS = (
    *(1 * MS, 2_500 * US, 5 * MS, 10 * MS, 25 * MS, 50 * MS, 100 * MS, 250 * MS, 500 * MS),
    *(1 * S, 2_500 * MS, 5 * S, 10 * S),
)
DISPATCH_BOUNDS_NS = (
    *(100 * US, 250 * US, 500 * US, 1 * MS, 2_500 * US, 5 * MS, 10 * MS, 25 * MS, 50 * MS),
    *(100 * MS, 250 * MS, 500 * MS, 1 * S, 2_500 * MS, 5 * S, 10 * S, 30 * S, 60 * S),
)
STEP_BOUNDS_NS = (10 * US, 25 * US, *REQUEST_BOUNDS_NS)
SIZE_BOUNDS_BYTES = tuple(4**exponent for exponent in range(3, 12))
assert (SIZE_BOUNDS_BYTES[0], SIZE_BOUNDS_BYTES[-1]) == (64, 4 << 20)

CODES = tuple(ERROR_BY_CODE)
"""Error codes in the order of their counts."""


@dataclass(frozen=True, slots=True)
class HistogramLayout:
    """One histogram. `index` is its first word, `label` tells it from others of the same name."""

    name: str
    owner: str
    label: str
    bounds: tuple[int, ...]
    unit: float
    """What a bound's 1 is in base units: 1e-9 for nanoseconds, 1 for bytes."""
    index: int

    @property
    def sum_index(self) -> int:
        return self.index + len(self.bounds) + 1


HISTOGRAMS: list[HistogramLayout] = []
_used = dict.fromkeys(control.ROLES, 0)


def _take(owner: str, words: int) -> int:
    at = _used[owner]
    _used[owner] = at + words
    assert _used[owner] <= PAGE_SIZE // WORD_SIZE, f"figures of {owner} are full"
    return (control.HISTOGRAMS_START + control.ROLES.index(owner) * PAGE_SIZE) // WORD_SIZE + at


def _histogram(
    name: str, owner: str, bounds: tuple[int, ...], label: str = "", *, unit: float = 1e-9
) -> HistogramLayout:
    assert list(bounds) == sorted(set(bounds)), name
    place = HistogramLayout(name, owner, label, bounds, unit, _take(owner, len(bounds) + 2))
    HISTOGRAMS.append(place)
    return place


STEPS = {role: _histogram("role_step", role, STEP_BOUNDS_NS, role) for role in control.ROLES}
APPENDS = _histogram("append", control.WRITER, APPEND_BOUNDS_NS)
MESSAGE_SIZES = _histogram("message_size", control.WRITER, SIZE_BOUNDS_BYTES, unit=1)
# Under SYNC_FLUSH the writer syncs the log itself: both are flushes of the CommitLog.
WRITER_SYNCS = _histogram("flush", control.WRITER, FLUSH_BOUNDS_NS, "commitlog")
LOG_FLUSHES = _histogram("flush", control.COMMITLOG_FLUSHER, FLUSH_BOUNDS_NS, "commitlog")
QUEUE_FLUSHES = _histogram("flush", control.CQ_FLUSHER, FLUSH_BOUNDS_NS, "consumequeue")
INDEX_FLUSHES = _histogram("flush", control.INDEX_FLUSHER, FLUSH_BOUNDS_NS, "index")
DISPATCH_DELAYS = _histogram("dispatch_delay", control.DISPATCHER, DISPATCH_BOUNDS_NS)
PULL_REQUESTS = _histogram("request", control.QUERY, REQUEST_BOUNDS_NS, "pull")
KEY_REQUESTS = _histogram("request", control.QUERY, REQUEST_BOUNDS_NS, "key")
OTHER_REQUESTS = _histogram("request", control.QUERY, REQUEST_BOUNDS_NS, "other")

REJECTS = {role: _take(role, len(CODES)) for role in (control.WRITER, control.QUERY)}
"""For each role with a socket: the first of its counts of refusals, in the order of CODES."""

# A kernel whose state lies here reaches its role's counts without a further argument.
APPEND_STATE_WORDS = 64
APPEND_STATE = _take(control.WRITER, APPEND_STATE_WORDS)
"""First word of the state of `kernels.append`: the frame in hand, and what was counted but not published yet."""
DISPATCH_STATE_WORDS = 16
DISPATCH_STATE = _take(control.DISPATCHER, DISPATCH_STATE_WORDS)
"""First word of the state of `kernels.dispatched`: the step in hand."""
