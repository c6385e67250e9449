"""What append requests of one kind have in common, checked and encoded once: a client's next frame is most often of the
kind that its last one was of.

A kind is what depends neither on a frame's messages nor on its topic: the constant properties around the unique id, tag
and keys, and which columns the payload has.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from mqproc.errors import BadMessageError, BadPropertyError, PropertiesTooLargeError
from mqproc.layout import properties, record
from mqproc.wire.operations import AppendRequest

UNIQUE_PREFIX_DIGITS: Final = 28
KINDS_MAX: Final = 256
"""Kinds that are kept. Constant properties are 32,767 bytes at most, here and in what a kind is found by."""

_UNIQUE_NAME = f"{properties.UNIQ_KEY}{properties.NAME_END}".encode()
_NAME_END = properties.NAME_END.encode()
_PAIR_END = properties.PAIR_END.encode()
_SHARDING_BUCKET = properties.bucket(properties.SHARDING_KEY)
_SEPARATORS = (properties.NAME_END, properties.PAIR_END)
_are_pairs = re.compile(rb"(?:[^\x01\x02]+\x01[^\x01\x02]*\x02)+").fullmatch
_fields = operator.attrgetter("born_host", "has_born", "has_queues", "has_flags", "has_prepared")
gaps_of: Callable[[AppendRequest], tuple[bytes, ...]] = operator.attrgetter(
    "gap_before_unique", "gap_before_tag", "gap_before_keys", "gap_after_keys"
)
# Where whole property strings were given none applies.
_NO_GAPS: tuple[bytes, ...] = (b"", b"", b"", b"")


class FrameKind(NamedTuple):
    """`before_id`, `before_tag`, `before_keys` and `after_keys` are constant properties; unique id, tag and keys stand
    between them. `sharding_at` is where in `before_id` a sharding key stands. `more_columns`: the payload has others
    than those of bodies, keys and tags.
    """

    before_id: bytes
    before_tag: bytes
    before_keys: bytes
    after_keys: bytes
    sharding_at: int
    more_columns: bool


def kind_of(request: AppendRequest) -> FrameKind:
    """The kind of a request whose messages do not wait. Raises BadMessageError, BadPropertyError and its kin."""
    if request.properties_bytes >= 0:
        return _kept(_columns_of(request), "", _NO_GAPS)
    return _kept(_columns_of(request), _tag_of(request), gaps_of(request))


def parked_kind(request: AppendRequest) -> FrameKind:
    """The same of one whose messages wait: its own properties tell of each, so it is not kept."""
    return _kind(_columns_of(request), _tag_of(request), gaps_of(request))


def _columns_of(request: AppendRequest) -> tuple[Any, ...]:
    return (
        *_fields(request),
        request.unique_prefix != "",
        request.properties_bytes >= 0,
        request.sharding_bytes >= 0,
    )


def _tag_of(request: AppendRequest) -> str:
    """The tag of all messages. One beside a column of tags does not count: nobody looks at it, however large it is."""
    return "" if request.tags_bytes >= 0 else request.tag


def _kind(columns: tuple[Any, ...], tag: str, gaps: tuple[bytes, ...]) -> FrameKind:
    born_host, has_born, has_queues, has_flags, has_prepared, has_id, has_properties, has_sharding = columns
    before_id, before_tag, before_keys, after_keys = gaps
    if len(born_host) not in (record.HOST_V4_SIZE, record.HOST_V6_SIZE):
        raise BadMessageError(f"born_host has {len(born_host)} bytes; it takes 8 or 20")
    more_columns = has_born or has_queues or has_flags or has_prepared or has_properties or has_sharding
    if has_properties:
        # Strings that were given whole get what tells of the waiting behind them.
        return FrameKind(b"", b"", b"", after_keys, 0, more_columns)
    for gap in gaps:
        if gap and not _are_pairs(gap):
            raise BadPropertyError(f"properties {gap[:64]!r} are not pairs of name, byte 1, value, byte 2")
    sharding_at = _sharding_at(before_id) if has_sharding else 0
    if has_id:
        before_id += _UNIQUE_NAME
        before_tag = _PAIR_END + before_tag
    if tag:
        if any(separator in tag for separator in _SEPARATORS):
            raise BadPropertyError(f"property {properties.TAGS}: its value has a separator byte (1 or 2)")
        before_tag += f"{properties.TAGS}{properties.NAME_END}{tag}{properties.PAIR_END}".encode()
    size = len(before_id) + UNIQUE_PREFIX_DIGITS * has_id + len(before_tag) + len(before_keys) + len(after_keys)
    if size > record.PROPERTIES_SIZE_MAX:
        raise PropertiesTooLargeError(f"properties of {size:,} bytes; the limit is {record.PROPERTIES_SIZE_MAX:,}")
    return FrameKind(before_id, before_tag, before_keys, after_keys, sharding_at, more_columns)


_kept = functools.lru_cache(maxsize=KINDS_MAX)(_kind)


def _sharding_at(before_id: bytes) -> int:
    """Where a sharding key stands in RocketMQ's order: so many bytes of the first constant properties come before."""
    pairs = before_id.split(_PAIR_END)[:-1]
    return sum(len(pair) + 1 for pair in pairs if properties.bucket(_name_of(pair)) < _SHARDING_BUCKET)


def _name_of(pair: bytes) -> str:
    return pair.partition(_NAME_END)[0].decode("utf-8", "replace")
