"""Tasks of asyncio that an object has for itself, and ends."""

from __future__ import annotations

import asyncio
from typing import Any


async def end(task: asyncio.Task[Any], timeout_s: float) -> None:
    """Cancel a task and wait for its end, at most so long: a user's function may hold it up. Raises what it has raised.

    Its end only: to await the task itself would take a cancellation of the caller's own for the task's.
    """
    task.cancel()
    await asyncio.wait([task], timeout=timeout_s)
    if task.done() and not task.cancelled():
        task.result()


def is_cancelled() -> bool:
    """Whether this task shall end; else a CancelledError is of something that it had awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
