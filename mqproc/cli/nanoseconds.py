"""Moments and time spans in nanoseconds, as Parquet may have them: Python has none of its own."""

from __future__ import annotations

import datetime
from typing import Any


def plain(value: Any) -> Any:
    """What pyarrow makes of nanoseconds where pandas is installed, as Python's own moment or time span.

    Text where it has nanoseconds indeed, which those have no room for.
    """
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    if isinstance(value, datetime.datetime) and type(value) is not datetime.datetime:
        moment: Any = value
        return moment.isoformat().replace("+00:00", "Z") if moment.nanosecond else moment.to_pydatetime()
    if isinstance(value, datetime.timedelta) and type(value) is not datetime.timedelta:
        span: Any = value
        return span.isoformat() if span.nanoseconds else span.to_pytimedelta()
    return value
