"""Fields of messages to send: unique ids, checks, and RocketMQ's order of properties.

The writer fills in UNIQ_KEY, TAGS and KEYS. Other properties that all messages of a frame share are sent as the four
gaps around those three; properties that differ are sent as whole strings.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from mqproc.errors import (
    BadLevelError,
    BadMessageError,
    BadPropertyError,
    BadRequestError,
    BadTimeError,
    NoSuchQueueError,
)
from mqproc.layout.properties import (
    KEY_SEPARATOR,
    KEYS,
    NAME_END,
    PAIR_END,
    RESERVED,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    bucket,
)
from mqproc.topic_names import check_matchable
from mqproc.util.units import DELAY_LEVELS

# Unique ids (property UNIQ_KEY), in RocketMQ's layout:
#
#     ┌────────┬────────────────┬────────┬─────────────────────────────────┬─────────┐
#     │ IPv4 4 │ pid low 16 b 2 │ hash 4 │ ms since the month's start u32 4│ counter 2│  upper-case hex, 32 characters
#     └────────┴────────────────┴────────┴─────────────────────────────────┴─────────┘
#       ◀──────────────── prefix, 28 characters, one for a frame ─────────▶  one a message
#
# The address is the loopback's, since clients are local; the hash is random for each process, where RocketMQ uses a
# class loader's. One time has at most 65,536 counters, then the time is advanced, so no pair is repeated.

COUNTERS: Final = 1 << 16
PREFIX_CHARACTERS: Final = 28
ID_CHARACTERS: Final = 32
_ADDRESS: Final = bytes((127, 0, 0, 1))


def _month_bounds_ms(time_ms: int) -> tuple[int, int]:
    """First ms of the local month that holds `time_ms`, and of the next month."""
    now = time.localtime(time_ms / 1000)
    start = time.mktime((now.tm_year, now.tm_mon, 1, 0, 0, 0, 0, 0, -1))
    end = time.mktime((now.tm_year, now.tm_mon + 1, 1, 0, 0, 0, 0, 0, -1))
    return int(start) * 1000, int(end) * 1000


class UniqueIds:
    """Source of prefixes with runs of counters. Thread-safe; a forked child needs a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._head = (_ADDRESS + (os.getpid() & 0xFFFF).to_bytes(2, "big") + os.urandom(4)).hex().upper()
        self._counter = int.from_bytes(os.urandom(2), "big")
        self._time_ms = 0
        self._used = COUNTERS  # under _time_ms
        self._month_start_ms = 0
        self._month_end_ms = 0
        self._prefix = ""

    def reserve(self, count: int) -> tuple[str, int]:
        """Reserve `count` counters, at most 65,536: their prefix and the first one."""
        assert 0 < count <= COUNTERS
        now_ms = time.time_ns() // 1_000_000
        with self._lock:
            if now_ms > self._time_ms:
                self._set_time(now_ms)
            elif self._used + count > COUNTERS:
                self._set_time(self._time_ms + 1)
            self._used += count
            first = self._counter
            self._counter = (first + count) % COUNTERS
            return self._prefix, first

    def _set_time(self, time_ms: int) -> None:
        if time_ms >= self._month_end_ms or time_ms < self._month_start_ms:
            self._month_start_ms, self._month_end_ms = _month_bounds_ms(time_ms)
        self._time_ms = time_ms
        self._used = 0
        self._prefix = f"{self._head}{time_ms - self._month_start_ms:08X}"


def unique_id(prefix: str, counter: int) -> str:
    """Id of one message of a frame."""
    return f"{prefix}{counter % COUNTERS:04X}"


def unique_ids(prefix: str, counter: int, count: int) -> list[str]:
    """Ids of a frame's messages."""
    first = counter % COUNTERS
    numbers = itertools.chain(range(first, min(first + count, COUNTERS)), range(first + count - COUNTERS))
    return list(map(f"{prefix}%04X".__mod__, numbers))


# One source per process: two with the same process id could collide.
process_ids = UniqueIds()


def _after_fork() -> None:
    global process_ids
    process_ids = UniqueIds()


os.register_at_fork(after_in_child=_after_fork)


def reserve(count: int) -> tuple[str, int]:
    """Reserve counters of this process: their prefix and the first of `count`."""
    return process_ids.reserve(count)


# Properties


# Properties with this prefix are for RocketMQ's clients alone and must not be stored.
TRANSIENT_PREFIX: Final = "__RMQ.TRANSIENT."

_SEPARATOR = re.compile(f"[{NAME_END}{PAIR_END}]")
_KEY_FORBIDDEN = re.compile(f"[{NAME_END}{PAIR_END}{KEY_SEPARATOR}]")
_is_key = re.compile(f"[^{NAME_END}{PAIR_END}{KEY_SEPARATOR}]+").fullmatch

# Buckets, in RocketMQ's order, of the names that the writer fills in; the four gaps surround them.
_UNIQUE_BUCKET, _TAG_BUCKET, _KEYS_BUCKET = bucket(UNIQ_KEY), bucket(TAGS), bucket(KEYS)
assert _UNIQUE_BUCKET < _TAG_BUCKET < _KEYS_BUCKET
# Bytes of those three pairs without the values of tag and keys.
FIXED_PAIRS_BYTES: Final = len(UNIQ_KEY) + ID_CHARACTERS + len(TAGS) + len(KEYS) + 6
# Bytes of a sharding key's pair without its value.
SHARDING_PAIR_BYTES: Final = len(SHARDING_KEY) + 2

_bucket = functools.lru_cache(4096)(bucket)


def plain_text(text: Any) -> Any:
    """The plain value of a subclass of str, such as an enum member; others unchanged.

    Its `format`, `hash` and `str` may give something else.
    """
    return str.__str__(text) if isinstance(text, str) and type(text) is not str else text


def plain_pair(name: str, value: str) -> tuple[str, str]:
    """Check a user's property. Raises BadPropertyError if it cannot be stored unchanged."""
    if type(name) is not str or type(value) is not str:
        name, value = plain_text(name), plain_text(value)
    check_property(name, value)
    return name, value


class SystemProperties(dict[str, str]):
    """Checked properties of a message that the client makes itself: reserved names are allowed."""


def check_property(name: str, value: str) -> None:
    """Raise BadPropertyError unless a user's property can be stored and read back unchanged."""
    if not isinstance(name, str) or not isinstance(value, str) or not name or not value:
        raise BadPropertyError(f"property {name!r} = {value!r}: name and value must be texts that are not empty")
    if name in RESERVED or name.startswith(TRANSIENT_PREFIX):
        use = RESERVED.get(name, "RocketMQ's clients do not store it")
        raise BadPropertyError(f"property {name!r} is reserved: {use}")
    if found := _SEPARATOR.search(name) or _SEPARATOR.search(value):
        raise BadPropertyError(f"property {name!r} holds the separator byte 0x{ord(found[0]):02X}")


def _check_text(what: str, text: str, forbidden: re.Pattern[str] = _SEPARATOR) -> None:
    if not isinstance(text, str):
        raise BadPropertyError(f"{what} {text!r} is no text")
    if found := forbidden.search(text):
        raise BadPropertyError(f"{what} {text[:64]!r} holds the separator byte 0x{ord(found[0]):02X}")


def check_tag(tag: str) -> None:
    """Raise BadPropertyError when a tag contains a separator byte, or no filter can match it."""
    _check_text("tag", tag)
    check_matchable(tag)


def check_keys(keys: Sequence[str]) -> None:
    """Raise BadPropertyError when a key is empty, or has a separator or a space."""
    if type(keys) is not tuple and (isinstance(keys, str | bytes) or not isinstance(keys, Sequence)):
        kind = type(keys).__name__
        raise BadPropertyError(f"keys must be a sequence of texts, not {repr(keys)[:64]} of type {kind}")
    for key in keys:
        if type(key) is not str or not _is_key(key):
            _check_key(key)


def _check_key(key: object) -> None:
    if not isinstance(key, str) or not key:
        raise BadPropertyError(f"key {key!r} is empty or no text")
    _check_text("key", key, _KEY_FORBIDDEN)


def check_property_rows(rows: Any, count: int) -> Sequence[Mapping[str, str]]:
    """Return properties with one mapping for each message.

    Raises BadRequestError for another form.
    """
    if isinstance(rows, str | bytes) or not isinstance(rows, Sequence):
        kind = type(rows).__name__
        raise BadPropertyError(f"properties must be a mapping, or a list with one for each message, not a {kind}")
    if len(rows) != count:
        raise BadMessageError(f"{len(rows):,} properties for {count:,} bodies")
    return rows


def check_unique_id(unique: str) -> None:
    """Raise BadPropertyError unless a user's unique id is a text without separators."""
    _check_text("unique id", unique, _KEY_FORBIDDEN)


def check_sharding_key(sharding_key: str, properties: Mapping[str, str], *, names_queue: bool) -> None:
    """Raise BadRequestError for a sharding key beside a queue id or another key."""
    _check_text("sharding key", sharding_key)
    if sharding_key and names_queue:
        raise BadRequestError("a message has a sharding key, which picks its queue, or a queue id, not both")
    if sharding_key and SHARDING_KEY in map(plain_text, properties):
        raise BadPropertyError(f"property {SHARDING_KEY!r} is given beside the sharding key that it would hold")


class Gaps(NamedTuple):
    """Encoded properties of a frame, by their place among the three of the writer."""

    before_unique: bytes = b""
    before_tag: bytes = b""
    before_keys: bytes = b""
    after_keys: bytes = b""


NO_GAPS = Gaps()


def split_at_gaps(properties: Mapping[str, str]) -> Gaps:
    """Encode constant properties.

    Within a shared bucket, tag and keys are first and the unique id is last.
    """
    parts: tuple[list[str], ...] = ([], [], [], [])
    pairs = dict(itertools.starmap(plain_pair, properties.items()))
    for name in sorted(pairs, key=_bucket):
        place = _bucket(name)
        gap = (place > _UNIQUE_BUCKET) + (place >= _TAG_BUCKET) + (place >= _KEYS_BUCKET)
        parts[gap].append(f"{name}{NAME_END}{pairs[name]}{PAIR_END}")
    return Gaps(*(utf8("properties", "".join(part)) for part in parts))


def utf8(name: str, text: str) -> bytes:
    """Encode a text. Raises BadPropertyError for one with an unpaired surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadPropertyError(f"{name}: {error}") from None


def not_properties(properties: object) -> BadPropertyError:
    """The error for properties that are not a mapping."""
    kind = type(properties).__name__
    return BadPropertyError(f"properties must be a mapping of names to values, not a {kind}: {repr(properties)[:64]}")


def whole_properties(tag: str, keys: str, properties: Mapping[str, str], unique: str, sharding_key: str = "") -> str:
    """The whole property string of one message, in RocketMQ's order."""
    pairs = {}
    if sharding_key:
        pairs[SHARDING_KEY] = plain_text(sharding_key)
    if tag:
        pairs[TAGS] = plain_text(tag)
    if keys:
        pairs[KEYS] = keys
    if not isinstance(properties, Mapping):
        raise not_properties(properties)
    is_checked = isinstance(properties, SystemProperties)
    pairs.update(properties if is_checked else itertools.starmap(plain_pair, properties.items()))
    pairs[UNIQ_KEY] = plain_text(unique)
    return "".join([f"{name}{NAME_END}{pairs[name]}{PAIR_END}" for name in sorted(pairs, key=_bucket)])


# Numbers


_SHOWN_CHARACTERS: Final = 64
_WHOLE: Final = (int, np.integer)
_NOT_WHOLE: Final = (bool, np.timedelta64)


def is_whole(value: object) -> bool:
    """Whether a value is an integer of Python or numpy, but no bool or timedelta64."""
    return type(value) is int or (isinstance(value, _WHOLE) and not isinstance(value, _NOT_WHOLE))


def check_queue_id(queue_id: Any, of_each: Any = None) -> None:
    """Raise NoSuchQueueError for an impossible id, BadRequestError beside `of_each`."""
    if of_each is not None:
        raise BadRequestError("a batch has one queue id for all messages, or one for each, not both")
    if not is_whole(queue_id):
        raise BadRequestError(_no_whole_number("queue_id", queue_id))
    if not 0 <= queue_id < 1 << 31:
        raise NoSuchQueueError(f"queue id {queue_id:,} is below 0 or too large")


def check_flag(flag: Any) -> None:
    """Raise BadMessageError when a flag does not fit its field."""
    if not is_whole(flag):
        raise BadMessageError(_no_whole_number("flag", flag))
    if not -(1 << 31) <= flag < 1 << 31:
        raise BadMessageError(f"flag {flag:,} does not fit 32 bits")


def check_born(born_timestamp_ms: Any) -> None:
    """Raise BadMessageError when a born time does not fit its field."""
    if born_timestamp_ms is None:
        return
    if not is_whole(born_timestamp_ms):
        raise BadMessageError(_no_whole_number("born_timestamp_ms", born_timestamp_ms))
    if not -(1 << 63) <= born_timestamp_ms < 1 << 63:
        raise BadMessageError(f"born_timestamp_ms {born_timestamp_ms:,} does not fit 64 bits")


def _no_whole_number(name: str, value: object) -> str:
    return f"{name} = {repr(value)[:_SHOWN_CHARACTERS]} is no whole number"


def check_delay(delay_level: Any, deliver_at_ms: Any) -> None:
    """Raise BadLevelError, BadTimeError or BadMessageError for an invalid delay."""
    if not is_whole(delay_level):
        raise _not_one_time("delay_level", delay_level)
    if not is_whole(deliver_at_ms):
        raise _not_one_time("deliver_at_ms", deliver_at_ms)
    if not 0 <= delay_level <= DELAY_LEVELS:
        raise BadLevelError(f"delay level {delay_level} is out of range: from 1 to {DELAY_LEVELS}")
    if not 0 <= deliver_at_ms < 1 << 62:
        raise BadTimeError(f"deliver_at_ms = {deliver_at_ms} is no time")
    if delay_level and deliver_at_ms:
        raise BadMessageError("a message has a delay level or a time to deliver at, not both")


def _not_one_time(name: str, value: Any) -> BadMessageError:
    return BadMessageError(f"{name} is a {type(value).__name__}: messages sent so wait for one time, an integer")
