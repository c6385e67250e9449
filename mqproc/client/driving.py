"""Running steps: generators of calls, which the sync and the async client run alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from mqproc.client.core import Call
from mqproc.client.group_steps import Steps

T = TypeVar("T")


def drive(run: Callable[[Call[Any]], Any], steps: Steps[T]) -> T:
    """The value of steps whose calls `run` makes; what it raises goes into the steps."""
    try:
        call = next(steps)
        while True:
            try:
                value = run(call)
            except Exception as error:
                call = steps.throw(error)
            else:
                call = steps.send(value)
    except StopIteration as end:
        found: T = end.value
        return found


async def drive_async(run: Callable[[Call[Any]], Awaitable[Any]], steps: Steps[T]) -> T:
    """The same with a `run` that is awaited."""
    try:
        call = next(steps)
        while True:
            try:
                value = await run(call)
            except Exception as error:
                call = steps.throw(error)
            else:
                call = steps.send(value)
    except StopIteration as end:
        found: T = end.value
        return found
