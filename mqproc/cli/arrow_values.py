"""Values of Parquet that JSON or Python have not: NaN and the infinities; moments and time spans in nanoseconds."""

from __future__ import annotations

import datetime
from typing import Any


def not_finite(values: Any) -> int:
    """How many numbers of a record batch or an array are NaN or infinite, those within lists and structs too."""
    import pyarrow
    import pyarrow.compute as compute

    if isinstance(values, pyarrow.RecordBatch):
        return sum(map(not_finite, values.columns))
    if pyarrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if pyarrow.types.is_floating(kind):
        wide = values.cast("float32") if pyarrow.types.is_float16(kind) else values
        finite: int = compute.sum(compute.is_finite(wide)).as_py() or 0
        return len(wide) - int(wide.null_count) - finite
    if pyarrow.types.is_struct(kind):
        return sum(map(not_finite, values.flatten()))
    if pyarrow.types.is_map(kind):
        values = pyarrow.ListArray.from_arrays(values.offsets, values.items)
    return not_finite(values.flatten()) if pyarrow.types.is_nested(kind) else 0


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
