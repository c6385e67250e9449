"""Bounds that hold for the options of every request to the query role."""

from __future__ import annotations

from typing import Final

import msgspec

from mqproc.errors import BadRequestError, FilterSyntaxError
from mqproc.names import FILTER_BYTES_MAX
from mqproc.wire.operations import Options

_INTEGER_MAX: Final = 1 << 62


def bounded(options: Options) -> Options:
    """The options with numbers that fit 64-bit arithmetic. Raises BadRequestError, FilterSyntaxError."""
    changes: dict[str, int] = {}
    for name in options.__struct_fields__:
        value = getattr(options, name)
        if type(value) is int and not -_INTEGER_MAX <= value <= _INTEGER_MAX:
            changes[name] = _INTEGER_MAX if value > 0 else -_INTEGER_MAX
    tags = getattr(options, "tags", None)
    if tags and (size := sum(len(tag.encode()) for tag in tags)) > FILTER_BYTES_MAX:
        raise FilterSyntaxError(f"filter of {size:,} bytes exceeds {FILTER_BYTES_MAX:,}", position=FILTER_BYTES_MAX)
    cursor = getattr(options, "cursor", None)
    if cursor and any(not -_INTEGER_MAX <= place <= _INTEGER_MAX for place in cursor):
        raise BadRequestError(f"cursor {cursor[:2]} is none of ours")
    return msgspec.structs.replace(options, **changes) if changes else options
