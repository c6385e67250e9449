"""`mqproc bench counting`: what the writer's counting costs a message, by runs in pairs, with it and without.

The very objects that the writer uses, over memory as large as a control file; nothing else runs in the loop, so what
is left when the empty loop's time is taken off is the counting. The median of the pairs stands up to a busy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import click

from mqproc.cli.commands import Command
from mqproc.cli.invocation import Invocation, pass_invocation
from mqproc.cli.output import Column
from mqproc.io import StoreIO
from mqproc.layout import control as layout
from mqproc.process.append_figures import AppendFigures
from mqproc.shm.clock import Clock
from mqproc.shm.words import Words

MESSAGES_A_STEP = (1, 16, 128, 1000)
RECORD_BYTES = 256
PAIRS = 21
STEPS = 20_000
_COLUMNS = [
    Column("messages", "messages a step", "count"),
    Column("step_ns", "ns a step", "number"),
    Column("message_ns", "ns a message", "number"),
]


@click.command(cls=Command)
@pass_invocation
def counting(invocation: Invocation) -> None:
    """Measure what counting costs a message.

    A step of the writer is counted, timed and sized; the processor time of that alone, by the size of a step, as the
    median of runs in pairs with and without it.
    """
    rows = [counting_cost(messages) for messages in MESSAGES_A_STEP]
    invocation.out.rows("counting", _COLUMNS, rows)


def counting_cost(messages: int, pairs: int = PAIRS, steps: int = STEPS) -> dict[str, Any]:
    """The cost of a step of so many messages in one request, in ns of processor time."""
    figures = AppendFigures(Words(StoreIO().shared_memory(layout.FILE_SIZE)))
    clock = Clock()

    def counted() -> None:
        for _ in range(steps):
            began_ns = clock.monotonic_ns()
            figures.committed(clock.monotonic_ns() - began_ns, 1)
            figures.appended(messages * RECORD_BYTES, messages)

    def uncounted() -> None:
        for _ in range(steps):
            clock.monotonic_ns()  # When the log's end was stored is needed for the lag in any case.

    differences = [_cpu_ns(counted) - _cpu_ns(uncounted) for _ in range(pairs)]
    step_ns = median(differences) / steps
    return {"messages": messages, "step_ns": round(step_ns), "message_ns": round(step_ns / messages, 2)}


def _cpu_ns(run: Callable[[], None]) -> int:
    began = time.process_time_ns()
    run()
    return time.process_time_ns() - began
