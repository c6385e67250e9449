"""Histograms and error counters at the end of the control file, a page a role.

    page   │ histograms of the role, counts by error code, state of a kernel that counts
    histogram of n bounds:  n + 1 counts, count i of values in (bound i − 1, bound i], the last one of values above all
                            bounds; then the sum, in the unit of the bounds

Words are packed, since only the role stores to its page. Bounds and sums are integers (nanoseconds or bytes), so that
kernels can add to them.
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
# These include the classes of RocketMQ's put times (10, 50, 100, 200, 500 ms, 1, 2, 3, 4, 5, 10 s) where they coincide.
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
"""Error codes in the order of their counters."""


@dataclass(frozen=True, slots=True)
class HistogramLayout:
    """A histogram: `index` of its first word; `label` distinguishes those of the same name."""

    name: str
    owner: str
    label: str
    bounds: tuple[int, ...]
    unit: float
    """Size of the bounds' unit in base units: 1e-9 for nanoseconds, 1 for bytes."""
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
# With SYNC_FLUSH the writer syncs the log itself; both histograms are flushes of the CommitLog.
WRITER_SYNCS = _histogram("flush", control.WRITER, FLUSH_BOUNDS_NS, "commitlog")
LOG_FLUSHES = _histogram("flush", control.COMMITLOG_FLUSHER, FLUSH_BOUNDS_NS, "commitlog")
QUEUE_FLUSHES = _histogram("flush", control.CQ_FLUSHER, FLUSH_BOUNDS_NS, "consumequeue")
INDEX_FLUSHES = _histogram("flush", control.INDEX_FLUSHER, FLUSH_BOUNDS_NS, "index")
DISPATCH_DELAYS = _histogram("dispatch_delay", control.DISPATCHER, DISPATCH_BOUNDS_NS)
PULL_REQUESTS = _histogram("request", control.QUERY, REQUEST_BOUNDS_NS, "pull")
KEY_REQUESTS = _histogram("request", control.QUERY, REQUEST_BOUNDS_NS, "key")
OTHER_REQUESTS = _histogram("request", control.QUERY, REQUEST_BOUNDS_NS, "other")

REJECTS = {role: _take(role, len(CODES)) for role in (control.WRITER, control.QUERY)}
"""For each role with a socket: first of its error counters, in the order of CODES."""

# Kernels with their state here reach the role's counters without a further argument.
APPEND_STATE_WORDS = 64
APPEND_STATE = _take(control.WRITER, APPEND_STATE_WORDS)
"""First word of the state of kernels/append_frame.py: the current frame and the unpublished counts."""
DISPATCH_STATE_WORDS = 16
DISPATCH_STATE = _take(control.DISPATCHER, DISPATCH_STATE_WORDS)
"""First word of the state of kernels/dispatch_step.py: the current step."""
