"""Lookup of append templates by key in a table of any load; storing of next offsets."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.config.options import Options
from mqproc.kernels import append_run as kernels
from mqproc.kernels.append_run import (
    ITEMS,
    KEY_BYTES_MAX,
    ROWS_MAX,
    SLOTS,
    find_row,
    key_hash,
    publish_touched,
    read_options,
)
from mqproc.kernels.jit.compile import plain
from mqproc.layout import queue_table
from mqproc.store.commitlog.append_templates import AppendTemplate, AppendTemplates, render, topic_fields
from mqproc.wire.operations import AppendRequest

QUEUES = 5
HOST = bytes(8)
TOPICS = st.sets(st.text("abcdé", min_size=1, max_size=4), max_size=30)


def options_of(topic: str) -> bytes:
    return msgspec.msgpack.encode(AppendRequest(topic, 1))


def key_of(topic: str) -> tuple[np.ndarray, int]:
    """(uint8[KEY_BYTES_MAX], size) of the key of frames for a topic."""
    key = np.zeros(KEY_BYTES_MAX, np.uint8)
    options = np.frombuffer(bytearray(options_of(topic)), np.uint8)
    return key, int(read_options(options, 0, len(options), np.zeros(ITEMS, np.int64), 0, key))


def known_topics(topics: Iterable[str]) -> AppendTemplates:
    """The table of an appender that has handled a frame for each of these topics."""
    known = AppendTemplates(QUEUES, np.zeros(QUEUES, np.int64), 1)
    for topic in topics:
        template = AppendTemplate(*topic_fields(topic), np.zeros(1, np.int64), -1, (b"", b"", b"", b""), HOST)
        known.add(memoryview(options_of(topic)), template, render(template, Options(), HOST, 1 << 20), answered=True)
    return known


@contextmanager
def uncompiled(hashed: int | None = None) -> Iterator[None]:
    """Use the plain twins for lookups; all keys have the hash `hashed` when it is given."""
    twins = {name: plain(getattr(kernels, name)) for name in ("find_row", "is_key", "key_hash")}
    if hashed is not None:
        twins["key_hash"] = lambda key, size: hashed
    with mock.patch.multiple(kernels, **twins):
        yield


def is_found(known: AppendTemplates, topic: str) -> bool:
    """Whether a topic's key is found; the row found must have this key."""
    key, size = key_of(topic)
    row = int(kernels.find_row(known.run, known.table, key, size))
    if row < 0:
        return False
    at = int(known.run[row + kernels.KEY_AT])
    assert known.table[at : at + size].tobytes() == key[:size].tobytes()
    assert known.run[row + kernels.KEY_SIZE] == size
    return True


@functools.cache
def topics_by_slot() -> dict[int, list[str]]:
    """Topics by the hash slot of their keys."""
    found = defaultdict(list)
    for number in range(3 * SLOTS):
        topic = f"T{number:05}"
        found[int(key_hash(*key_of(topic))) % SLOTS].append(topic)
    return found


@settings(max_examples=40, deadline=None)
@given(TOPICS, TOPICS)
def test_keys_added_are_found_and_no_others(added: set[str], others: set[str]) -> None:
    known = known_topics(sorted(added))
    assert [topic for topic in sorted(added | others) if is_found(known, topic)] == sorted(added)
    with uncompiled():
        assert [topic for topic in sorted(added | others) if is_found(known, topic)] == sorted(added)


@settings(max_examples=20, deadline=None)
@given(TOPICS, TOPICS, st.sampled_from([0, SLOTS - 1, SLOTS - 2, (1 << 40) - 1]))
def test_keys_with_equal_hashes_are_distinguished(added: set[str], others: set[str], hashed: int) -> None:
    with uncompiled(hashed):
        known = known_topics(sorted(added))
        assert [topic for topic in sorted(added | others) if is_found(known, topic)] == sorted(added)


@pytest.mark.parametrize("size", [*range(1, 18), 24, 25])
def test_keys_that_differ_in_one_byte_are_distinguished(size: int) -> None:
    key = np.arange(1, size + 3, dtype=np.uint8)
    table = np.concatenate([np.zeros(3, np.uint8), key])
    for same in (kernels.is_key, plain(kernels.is_key)):
        assert same(table, 3, key, size)
        for place in range(size + 2):
            other = key.copy()
            other[place] ^= 0x80
            assert bool(same(table, 3, other, size)) == (place >= size)


@pytest.mark.parametrize("first_slot", [1000, SLOTS - 2], ids=["amidst", "over_the_end"])
def test_keys_in_the_same_slots_are_all_found(first_slot: int) -> None:
    slots = [(first_slot + step) % SLOTS for step in range(4)]
    topics = [topic for slot in slots for topic in topics_by_slot()[slot]]
    assert len(topics) > len(slots)
    added, others = topics[::2], topics[1::2]
    for order in (added, added[::-1]):
        known = known_topics(order)
        assert all(is_found(known, topic) for topic in added)
        assert not any(is_found(known, topic) for topic in others)
        with uncompiled():
            assert all(is_found(known, topic) for topic in added)
            assert not any(is_found(known, topic) for topic in others)


def test_full_table_finds_all_keys() -> None:
    topics = [f"T{number}" for number in range(ROWS_MAX)]
    known = known_topics(topics)
    assert all(is_found(known, topic) for topic in topics)
    assert not any(is_found(known, f"U{number}") for number in range(200))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), st.binary(max_size=9))
def test_hash_depends_on_key_only_compiled_and_plain(key: bytes, behind: bytes) -> None:
    hashed = int(key_hash(np.frombuffer(bytearray(key + behind + b"\0"), np.uint8), len(key)))
    assert 0 <= hashed < 1 << 40
    # The plain twin raises IndexError for a load past the key.
    assert plain(key_hash)(np.frombuffer(bytearray(key), np.uint8), len(key)) == hashed


def test_keys_that_differ_in_one_byte_rarely_share_a_slot() -> None:
    taken = {int(key_hash(*key_of(f"Topic-{number}"))) % SLOTS for number in range(1000)}
    # 1000 random keys take about 941 of 8192 slots.
    assert len(taken) > 900


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, QUEUES - 1), max_size=6),
    st.lists(st.integers(0, QUEUES - 1), max_size=3),
    st.lists(st.integers(0, 1 << 62), min_size=QUEUES, max_size=QUEUES),
)
def test_next_offsets_are_stored_for_noted_queues_only(noted: list[int], of_before: list[int], own: list[int]) -> None:
    for kernel in (publish_touched, plain(publish_touched)):
        cells = np.full(queue_table.HEADER_WORDS + QUEUES * queue_table.ENTRY_WORDS, -1, np.int64)
        run = np.full(kernels.FOUND, 77, np.int64)
        run[kernels.TOUCHED] = len(noted)
        kernel(cells, run, np.array(own, np.int64), np.array([*noted, *of_before, 0], np.int64))
        places = [queue_table.entry_word(number, queue_table.NEXT_OFFSET) for number in range(QUEUES)]
        assert cells[places].tolist() == [own[number] if number in noted else -1 for number in range(QUEUES)]
        cells[places] = -1
        assert (cells == -1).all()
        forgotten = {kernels.TOUCHED: 0, kernels.TOUCHED_TOPIC: -1}
        assert run.tolist() == [forgotten.get(word, 77) for word in range(kernels.FOUND)]


def test_one_signature_is_compiled() -> None:
    kernels.warm()
    for kernel in (find_row, key_hash, publish_touched):
        assert len(getattr(kernel, "signatures", [0])) == 1
