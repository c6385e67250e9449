"""Numbers that callers give: refused where they are given, in words, before anything is asked for."""

from __future__ import annotations

import math

from mqproc.errors import BadRequestError


def at_least_one(name: str, value: int) -> int:
    """Raise BadRequestError for a number of messages or of workers that gets nothing done."""
    if not isinstance(value, int) or value < 1:
        raise BadRequestError(f"{name} = {value!r} is out of range: 1 at least")
    return value


def milliseconds(name: str, seconds: float) -> int:
    """Seconds as whole ms. Raises BadRequestError for what is no number of seconds."""
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        raise BadRequestError(f"{name} = {seconds!r} is no number of seconds")
    return round(seconds * 1000)
