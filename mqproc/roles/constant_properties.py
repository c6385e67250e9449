"""The constant properties of an append request's messages: what stands around unique id, tag and keys, checked."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from mqproc.errors import BadPropertyError, PropertiesTooLargeError
from mqproc.kernels.append_options import PREFIX_DIGITS
from mqproc.layout import properties, record
from mqproc.wire.operations import AppendRequest

UNIQUE_PREFIX_DIGITS: Final = PREFIX_DIGITS

_UNIQUE_NAME = f"{properties.UNIQ_KEY}{properties.NAME_END}".encode()
_NAME_END = properties.NAME_END.encode()
_PAIR_END = properties.PAIR_END.encode()
_SHARDING_BUCKET = properties.bucket(properties.SHARDING_KEY)
_SEPARATORS = (properties.NAME_END, properties.PAIR_END)
_are_pairs = re.compile(rb"(?:[^\x01\x02]+\x01[^\x01\x02]*\x02)+").fullmatch
gaps_of: Callable[[AppendRequest], tuple[bytes, bytes, bytes, bytes]] = operator.attrgetter(
    "gap_before_unique", "gap_before_tag", "gap_before_keys", "gap_after_keys"
)


class ConstantProperties(NamedTuple):
    """Unique id, tag and keys stand between the `parts`; `sharding_at` is where in the first a sharding key stands."""

    parts: tuple[bytes, bytes, bytes, bytes]
    sharding_at: int


def constant_properties(request: AppendRequest, *, parked: bool = False) -> ConstantProperties:
    """Those of a request, or of one that was changed for messages that wait. Raises BadPropertyError and its kin.

    Property strings that were given whole get none, but what tells of the waiting behind them.
    """
    gaps = gaps_of(request)
    before_id, before_tag, before_keys, after_keys = gaps
    if request.properties_bytes >= 0:
        return ConstantProperties((b"", b"", b"", after_keys if parked else b""), 0)
    for gap in gaps:
        if gap and not _are_pairs(gap):
            raise BadPropertyError(f"properties {gap[:64]!r} are not pairs of name, byte 1, value, byte 2")
    sharding_at = _sharding_at(before_id) if request.sharding_bytes >= 0 else 0
    has_id = request.unique_prefix != ""
    if has_id:
        before_id += _UNIQUE_NAME
        before_tag = _PAIR_END + before_tag
    # A tag beside a column of tags does not count: nobody looks at it, however large it is.
    if request.tag and request.tags_bytes < 0:
        if any(separator in request.tag for separator in _SEPARATORS):
            raise BadPropertyError(f"property {properties.TAGS}: its value has a separator byte (1 or 2)")
        before_tag += f"{properties.TAGS}{properties.NAME_END}{request.tag}{properties.PAIR_END}".encode()
    size = len(before_id) + UNIQUE_PREFIX_DIGITS * has_id + len(before_tag) + len(before_keys) + len(after_keys)
    if size > record.PROPERTIES_SIZE_MAX:
        raise PropertiesTooLargeError(f"properties of {size:,} bytes; the limit is {record.PROPERTIES_SIZE_MAX:,}")
    return ConstantProperties((before_id, before_tag, before_keys, after_keys), sharding_at)


def _sharding_at(before_id: bytes) -> int:
    """Where a sharding key stands in RocketMQ's order: so many bytes of the first constant properties come before."""
    pairs = before_id.split(_PAIR_END)[:-1]
    return sum(len(pair) + 1 for pair in pairs if properties.bucket(_name_of(pair)) < _SHARDING_BUCKET)


def _name_of(pair: bytes) -> str:
    return pair.partition(_NAME_END)[0].decode("utf-8", "replace")
