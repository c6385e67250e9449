"""Numbers that callers give, numpy's too: refused where they are given, in words, before anything is asked for."""

from __future__ import annotations

import math
import operator
from typing import SupportsFloat, SupportsIndex

from mqproc.errors import BadRequestError


def at_least_one(name: str, value: SupportsIndex) -> int:
    """Raise BadRequestError for a number of messages or of workers that gets nothing done."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise BadRequestError(f"{name} = {value!r} is out of range: 1 at least")
    return number


def milliseconds(name: str, seconds: SupportsFloat | SupportsIndex) -> int:
    """Seconds as whole ms. Raises BadRequestError for what is no number of seconds."""
    try:
        is_number = math.isfinite(seconds)
    except (TypeError, OverflowError):
        is_number = False
    if not is_number:
        raise BadRequestError(f"{name} = {seconds!r} is no number of seconds")
    return round(float(seconds) * 1000)
