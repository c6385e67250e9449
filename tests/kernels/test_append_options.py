"""In-place parsing of append options, against msgspec, which clients and writers use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.kernels import append_run
from mqproc.kernels.append_run import (
    BODIES_ITEM,
    BORN_ITEM,
    COUNT_ITEM,
    COUNTER_ITEM,
    ITEMS,
    KEY_BYTES_MAX,
    KEYS_ITEM,
    NOT_READ,
    PREFIX_DIGITS,
    PREFIX_ITEM,
    PROPERTIES_ITEM,
    SHARDING_ITEM,
    TAGS_ITEM,
    VARYING_ITEMS,
    read_options,
)
from mqproc.kernels.jit.compile import plain
from mqproc.wire.operations import AppendRequest

FIELDS = AppendRequest.__struct_fields__
NUMBER_ITEMS = sorted({*VARYING_ITEMS} - {PREFIX_ITEM})
PLACES = {
    "count": COUNT_ITEM,
    "bodies_bytes": BODIES_ITEM,
    "keys_bytes": KEYS_ITEM,
    "tags_bytes": TAGS_ITEM,
    "properties_bytes": PROPERTIES_ITEM,
    "unique_prefix": PREFIX_ITEM,
    "unique_counter": COUNTER_ITEM,
    "born_timestamp_ms": BORN_ITEM,
    "sharding_bytes": SHARDING_ITEM,
}
COLUMNS = ("keys_bytes", "tags_bytes", "properties_bytes", "sharding_bytes")
PREFIX = "0123456789ABCDEF0123456789AB"
HEAD = b"\xdc\x00" + bytes([ITEMS])
FOUND_AT, UNTOUCHED = 3, -77

_EDGES = sorted(
    {sign * (1 << bits) + step for bits in (5, 7, 8, 15, 16, 31, 32) for sign in (1, -1) for step in (-1, 0)}
)
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, *_EDGES, (1 << 63) - 1, -1 << 63]),
    st.integers(-300, 300),
    st.integers(-1 << 63, (1 << 63) - 1),
)
_TEXTS = st.one_of(st.text(max_size=8), st.text("abc", min_size=28, max_size=40))
_BYTES = st.one_of(st.binary(max_size=8), st.binary(min_size=250, max_size=260))
_KINDS: dict[Any, st.SearchStrategy[Any]] = {int: NUMBERS, bool: st.booleans(), str: _TEXTS, bytes: _BYTES}
VALUES = {name: _KINDS[kind] for name, kind in get_type_hints(AppendRequest).items() if name in FIELDS}
VALUES["unique_prefix"] = st.one_of(st.just(""), st.text("0123456789ABCDEF", min_size=28, max_size=28))
REQUESTS = st.builds(AppendRequest, **VALUES)
ONE = AppendRequest("Topic", 3, bodies_bytes=70_000, unique_prefix=PREFIX, born_host=bytes(300), tag="x" * 40)


class Read(NamedTuple):
    """Result of the kernel; `key` is empty when the options are rejected."""

    size: int
    found: list[int]
    key: bytes


def read(options: bytes, before: bytes = b"", behind: bytes = b"", function: Callable[..., int] = read_options) -> Read:
    """Parse options between other bytes of a buffer."""
    buffer = np.frombuffer(bytearray(before + options + behind) or bytearray(1), np.uint8)
    found = np.full(FOUND_AT + ITEMS + 1, UNTOUCHED, np.int64)
    key = np.zeros(KEY_BYTES_MAX, np.uint8)
    size = int(function(buffer, len(before), len(before) + len(options), found, FOUND_AT, key))
    told = {FOUND_AT + item for item in VARYING_ITEMS}
    assert all(word == UNTOUCHED for place, word in enumerate(found.tolist()) if place not in told)
    return Read(size, found[FOUND_AT : FOUND_AT + ITEMS].tolist(), key[: max(size, 0)].tobytes())


def read_plain(options: bytes, before: bytes = b"") -> Read:
    """Parse with the plain twin, which raises IndexError for loads past the options' end."""
    called = ("big_endian", "_are_hex_digits")
    with mock.patch.multiple(append_run, **{name: plain(getattr(append_run, name)) for name in called}):
        return read(options, before, function=plain(read_options))


def is_read(options: bytes) -> bool:
    """Whether options are accepted; the compiled and the plain kernel must agree."""
    compiled, uncompiled = read(options, behind=b"\x01" * 40), read_plain(options)
    assert compiled == uncompiled
    return compiled.size != NOT_READ


def with_item(item: int, encoded: bytes) -> bytes:
    """`ONE` with one item replaced by `encoded`."""
    items = [msgspec.msgpack.encode(value) for value in msgspec.structs.astuple(ONE)]
    items[item] = encoded
    return HEAD + b"".join(items)


def shape_of(request: AppendRequest) -> AppendRequest:
    """A request without the fields that differ between frames of one template."""
    present = {name: min(max(getattr(request, name), -1), 0) for name in COLUMNS}
    return msgspec.structs.replace(
        request,
        count=1,
        bodies_bytes=0,
        unique_prefix=PREFIX if request.unique_prefix else "",
        unique_counter=0,
        born_timestamp_ms=0,
        **present,
    )


def test_items_match_fields_of_request() -> None:
    assert len(FIELDS) == ITEMS
    assert {name: FIELDS.index(name) for name in PLACES} == PLACES
    assert sorted(PLACES.values()) == sorted(VARYING_ITEMS)


def test_one_signature_is_compiled() -> None:
    read(msgspec.msgpack.encode(ONE))
    assert len(getattr(read_options, "signatures", [0])) == 1


@settings(max_examples=300, deadline=None)
@given(REQUESTS, st.binary(max_size=9))
def test_read_numbers_and_prefix_match_request(request: AppendRequest, before: bytes) -> None:
    options = msgspec.msgpack.encode(request)
    compiled = read(options, before, b"\xff" * 9)
    assert compiled == read_plain(options, before)
    assert compiled.size != NOT_READ
    for item in NUMBER_ITEMS:
        assert compiled.found[item] == getattr(request, FIELDS[item])
    at = compiled.found[PREFIX_ITEM]
    if request.unique_prefix:
        assert (before + options)[at : at + PREFIX_DIGITS] == request.unique_prefix.encode()
    else:
        assert at == -1


@settings(max_examples=400, deadline=None)
@given(st.data(), REQUESTS)
def test_key_is_equal_only_for_equal_shapes(data: st.DataObject, one: AppendRequest) -> None:
    names = st.sampled_from(FIELDS if data.draw(st.booleans()) else sorted(PLACES))
    changes = {name: data.draw(VALUES[name]) for name in sorted(data.draw(st.sets(names, max_size=4)))}
    other = msgspec.structs.replace(one, **changes)
    first, second = (read(msgspec.msgpack.encode(request)).key for request in (one, other))
    assert first
    assert second
    assert (first == second) == (shape_of(one) == shape_of(other))


@pytest.mark.parametrize("name", [*COLUMNS, "unique_prefix"])
def test_key_depends_on_presence_of_columns_and_prefix(name: str) -> None:
    present, absent = (PREFIX, "") if name == "unique_prefix" else (0, -1)
    keys = [
        read(msgspec.msgpack.encode(msgspec.structs.replace(ONE, **{name: value}))).key for value in (present, absent)
    ]
    assert keys[0] != keys[1]
    assert keys[0][:-1] == keys[1][:-1]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(NUMBER_ITEMS), NUMBERS)
def test_number_is_read_in_any_width(item: int, value: int) -> None:
    encoded = [bytes([value & 0xFF])] if -32 <= value < 128 else []
    for power in range(4):
        width = 1 << power
        for first, signed in ((0xCC + power, False), (0xD0 + power, True)):
            try:
                encoded.append(bytes([first]) + value.to_bytes(width, "big", signed=signed))
            except OverflowError:
                continue
    assert encoded
    for number in encoded:
        options = with_item(item, number)
        compiled = read(options)
        assert compiled == read_plain(options)
        assert compiled.found[item] == value


@pytest.mark.parametrize("name", [name for name, kind in get_type_hints(AppendRequest).items() if kind is int])
def test_number_above_int64_is_rejected(name: str) -> None:
    for value, wanted in (((1 << 63) - 1, True), (1 << 63, False), ((1 << 64) - 1, False)):
        assert is_read(msgspec.msgpack.encode(msgspec.structs.replace(ONE, **{name: value}))) == wanted


def test_options_truncated_or_extended_are_rejected() -> None:
    options = msgspec.msgpack.encode(ONE)
    assert is_read(options)
    for size in range(len(options)):
        assert not is_read(options[:size]), size
    for byte in (0, 1, 0xA0, 0xC0, 0xFF):
        assert not is_read(options + bytes([byte]))


def test_array_of_other_length_or_head_is_rejected() -> None:
    items = msgspec.msgpack.encode(ONE)[len(HEAD) :]
    assert is_read(HEAD + items)
    for head in (b"\xdc\x00\x1e", b"\xdc\x00\x20", b"\xdc\x01\x1f", b"\xdd\x00\x00\x00\x1f", b"\xde\x00\x1f", b"\x9f"):
        assert not is_read(head + items)
    assert not is_read(msgspec.msgpack.encode([*msgspec.structs.astuple(ONE), 0]))
    assert not is_read(msgspec.msgpack.encode(msgspec.structs.astuple(ONE)[:-1]))


@pytest.mark.parametrize("wrong", "/ : @ G a f g \0 \x7f \x80 \xff".split(" "))
def test_prefix_with_other_characters_is_rejected(wrong: str) -> None:
    for place in range(PREFIX_DIGITS):
        digits = bytearray(PREFIX.encode())
        digits[place] = ord(wrong)
        assert not is_read(with_item(PREFIX_ITEM, b"\xbc" + digits)), place


def test_prefix_of_other_length_or_type_is_rejected() -> None:
    for size in range(32):
        assert is_read(with_item(PREFIX_ITEM, bytes([0xA0 + size]) + b"A" * size)) == (size in (0, PREFIX_DIGITS))
    digits = PREFIX.encode()
    for encoded in (b"\xd9\x1c" + digits, b"\xda\0\x1c" + digits, b"\xc4\x1c" + digits, b"\xc4\0", b"\0", b"\xc2"):
        assert not is_read(with_item(PREFIX_ITEM, encoded))


@pytest.mark.parametrize("item", NUMBER_ITEMS)
def test_number_of_other_type_is_rejected(item: int) -> None:
    values: list[Any] = [True, False, None, "", "a", "7" * 40, b"", b"\x07", 1.0, [], {}, [1]]
    for value in values:
        assert not is_read(with_item(item, msgspec.msgpack.encode(value))), value


@pytest.mark.parametrize("item", [item for item in range(ITEMS) if item not in VARYING_ITEMS])
def test_item_of_unused_type_is_rejected(item: int) -> None:
    values: list[Any] = [None, 1.0, [], {}, [1], msgspec.msgpack.Ext(5, b"a"), "a" * 70_000]
    for value in values:
        assert not is_read(with_item(item, msgspec.msgpack.encode(value))), value
    for encoded in (b"\xc1", b"\xca\0\0\0\0", b"\xdb\0\0\0\x01a", b"\xc6\0\0\0\x01a"):
        assert not is_read(with_item(item, encoded)), encoded


@pytest.mark.parametrize("name", ["topic", "tag", "born_host", "gap_after_keys"])
def test_key_size_is_limited(name: str) -> None:
    def options(size: int) -> bytes:
        text: str | bytes = "a" * size if get_type_hints(AppendRequest)[name] is str else b"a" * size
        return msgspec.msgpack.encode(msgspec.structs.replace(ONE, **{name: text}))

    short = read(options(1000)).size
    longest = 1000 + KEY_BYTES_MAX - short
    assert is_read(options(longest))
    assert read(options(longest)).size == KEY_BYTES_MAX
    for size in (longest + 1, longest + 2, 5000, 65_535):
        assert not is_read(options(size)), size


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Encoded options with bytes changed, removed or inserted, and possibly a truncated end."""
    options = bytearray(msgspec.msgpack.encode(draw(REQUESTS)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(options) - 1, 0)))
        byte = draw(st.one_of(st.sampled_from(range(0xC0, 0x100)), st.integers(0, 255)))
        stop = at + draw(st.sampled_from([0, 1, 1, 1, 2]))
        options[at:stop] = bytes([byte]) * draw(st.sampled_from([0, 1, 1, 1, 2]))
    return bytes(options[: draw(st.one_of(st.none(), st.integers(0, len(options))))])


@settings(max_examples=500, deadline=None)
@given(damaged(), st.binary(max_size=3))
def test_damaged_options_are_not_read_past_their_end(options: bytes, before: bytes) -> None:
    uncompiled = read_plain(options, before)
    for behind in (b"", b"\0" * 300, b"A" * 300):
        assert read(options, before, behind) == uncompiled
    if uncompiled.size == NOT_READ:
        return
    try:
        request = msgspec.msgpack.decode(options, type=AppendRequest)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    assert [uncompiled.found[item] for item in NUMBER_ITEMS] == [
        getattr(request, FIELDS[item]) for item in NUMBER_ITEMS
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from([0xA0, 0xC2, 0xC4, 0xCC, 0xD9])), max_size=60))
def test_any_items_compiled_and_plain_agree(items: list[int]) -> None:
    is_read(HEAD + bytes(items))
