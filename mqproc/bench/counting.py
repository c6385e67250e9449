"""`mqproc bench counting`: what the roles' counting costs a message, by runs in pairs, with it and without.

The kernels that the roles call at each step, as they are and without what they count, and the loop that counts and
times the steps of every role. What is left when the other run's time is taken off is the counting. Both loops read the
clock behind each step, since a loop must know when to rest and to beat: that is not counting, and not in what is left.
The runs are short and take turns, and the median of their pairs stands up to a busy machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import numpy as np
from numpy.typing import NDArray

from mqproc.bench.counted_frame import CountedFrame
from mqproc.cli.commands import Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Column
from mqproc.config import Options
from mqproc.control import Control
from mqproc.io import StoreIO
from mqproc.ipc.bell import EventBell
from mqproc.ipc.clock import Clock
from mqproc.kernels import append, dispatched, gather
from mqproc.kernels.jit import kernel, variant
from mqproc.layout import control as layout
from mqproc.layout import queue_table
from mqproc.paths import StorePaths
from mqproc.roles.heart import Heart
from mqproc.roles.loop import SAMPLE_NS, Loop, RoleContext, RoleSignals

MESSAGES_A_STEP = (1, 16, 128, 1000)
PAIRS = 301
# So many messages a run, but no more steps than this.
MESSAGES: Final = 10_000
STEPS_MAX: Final = 1000
STEP = "step"
"""The loop's own share, the same for each role."""
_COLUMNS = [
    Column("role", "role"),
    Column("messages", "messages a step", "count"),
    Column("step_ns", "ns a step", "number"),
    Column("message_ns", "ns a message", "number"),
]

Run = Callable[[int], None]
"""So many steps."""


@click.command(cls=Command)
@pass_invocation
def counting(invocation: Invocation) -> None:
    """Measure what counting costs a message.

    A step of the writer, one of the dispatcher, and a pull that the query role answers are counted, and the loop counts
    and times steps; the processor time of that alone, by how many messages there are in a step, as the median of runs
    in pairs with and without it. The loop's reading of the clock is in both, so it is not in the figures. Figures of a
    few ns a step, negative ones too, are noise.
    """
    rows = [counting_cost(messages, role) for role in _ROLES for messages in MESSAGES_A_STEP]
    invocation.out.rows("counting", _COLUMNS, rows)


def counting_cost(messages: int, role: str = layout.WRITER, pairs: int = PAIRS, most: int = MESSAGES) -> dict[str, Any]:
    """The cost of a step of so many messages in one request, in ns of processor time."""
    steps = max(1, min(STEPS_MAX, most // messages))
    with _ROLES[role](messages) as (counted, uncounted):
        counted(1)
        uncounted(1)
        differences = [_difference_ns(counted, uncounted, steps, first=pair % 2) for pair in range(pairs)]
    step_ns = median(differences) / steps
    return {"role": role, "messages": messages, "step_ns": round(step_ns), "message_ns": round(step_ns / messages, 2)}


@kernel
def _nothing(*given: Any) -> None:
    pass


def _control_file() -> NDArray[np.int64]:
    return np.frombuffer(StoreIO().shared_memory(layout.FILE_SIZE), np.int64)


@contextmanager
def _writer(messages: int) -> Iterator[tuple[Run, Run]]:
    frame = CountedFrame(_control_file(), messages)
    counts = ("begin_counting", "count_frame", "count_size", "count_messages")
    without = variant(append.encode_frame, **dict.fromkeys(counts, _nothing))
    yield partial(frame.encode, append.encode_frame), partial(frame.encode, without)


@contextmanager
def _dispatcher(messages: int) -> Iterator[tuple[Run, Run]]:
    cells = _control_file()
    cells[dispatched.RECORDS] = cells[dispatched.ENTRIES] = messages
    without = variant(dispatched.publish_step, _count_entries=_nothing)

    def publish(publish_step: Callable[..., int], steps: int) -> None:
        for _ in range(steps):
            publish_step(cells)

    yield partial(publish, dispatched.publish_step), partial(publish, without)


@contextmanager
def _query(messages: int) -> Iterator[tuple[Run, Run]]:
    cells = _control_file()
    frame = CountedFrame(cells, messages)
    frame.encode(append.encode_frame, 1)
    table = np.zeros(queue_table.HEADER_WORDS + queue_table.ENTRY_WORDS, np.int64)

    without = variant(gather.gather, _count=_nothing)
    yield partial(frame.gather, gather.gather, table), partial(frame.gather, without, table)


class _Worker:
    """A role that finds a message at each of so many steps, then asks for its end."""

    name = layout.KEEPER

    def __init__(self, signals: RoleSignals, messages: int) -> None:
        self.left = 0
        self._signals = signals
        self._messages = messages

    def do_work(self) -> int:
        self.left -= 1
        if self.left < 0:
            self._signals.stop_asked = True
            return 0
        return self._messages

    def wait(self, timeout_s: float) -> None:
        raise AssertionError("it is asked to end before it waits")

    def on_stop(self) -> bool:
        return True

    def close(self) -> None:
        pass


class _UncountedLoop(Loop):
    """The same loop, which neither looks how long a step took nor counts it; its clock is for rests and beats."""

    def _step(self) -> int:
        done = self._do_work()
        self._now_ns = now_ns = self._monotonic_ns()
        if now_ns >= self._sample_ns:
            self._heart.beat_if_due()
            self._sample_ns = now_ns + SAMPLE_NS
        return done

    def _count(self) -> None:
        pass


@contextmanager
def _steps(messages: int) -> Iterator[tuple[Run, Run]]:
    clock, io = Clock(), StoreIO()
    with tempfile.TemporaryDirectory() as folder:
        paths = StorePaths(Path(folder))
        control = Control.create(io, paths, clock, os.getpid())
        with closing(EventBell(control.cells, layout.role_word(layout.KEEPER, "sleeping"))) as bell:
            context = RoleContext(
                name=layout.KEEPER,
                paths=paths,
                options=Options(),
                control=control,
                io=io,
                clock=clock,
                bells={layout.KEEPER: bell},
                sockets={},
                incarnation=1,
                heart=Heart(control, layout.KEEPER, clock),
            )

            def run(kind: type[Loop], steps: int) -> None:
                signals = RoleSignals(bell)
                worker = _Worker(signals, messages)
                worker.left = steps
                kind(worker, context, signals).run()

            yield partial(run, Loop), partial(run, _UncountedLoop)


_ROLES = {layout.WRITER: _writer, layout.DISPATCHER: _dispatcher, layout.QUERY: _query, STEP: _steps}


def _difference_ns(counted: Run, uncounted: Run, steps: int, *, first: int) -> int:
    """Of two runs, the counted one first or second: what slows a machine down may come between them."""
    if first:
        counted_ns = _cpu_ns(counted, steps)
        return counted_ns - _cpu_ns(uncounted, steps)
    uncounted_ns = _cpu_ns(uncounted, steps)
    return _cpu_ns(counted, steps) - uncounted_ns


def _cpu_ns(run: Run, steps: int) -> int:
    began = time.process_time_ns()
    run(steps)
    return time.process_time_ns() - began
