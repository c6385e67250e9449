"""Runner of steps: generators of calls that do no I/O themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from mqproc.client.requests import Call, Steps

T = TypeVar("T")


async def run_steps(run: Callable[[Call[Any]], Awaitable[object]], steps: Steps[T]) -> T:
    """Make each call of `steps` with `run` and return the value of the steps.

    An exception of `run` is thrown into the steps.
    """
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
