"""Tasks of asyncio that an object has for itself, and ends."""

from __future__ import annotations

import asyncio
from typing import Any


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; raises what it has raised.

    Its end only: to await the task itself would take a cancellation of the caller's own for the task's.
    """
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def is_cancelled() -> bool:
    """Whether this task shall end; else a CancelledError is of something that it had awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
