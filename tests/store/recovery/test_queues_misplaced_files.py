"""Misplaced or missing queue files with damage in the log: no record of the log is hidden."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from mqproc.layout.consume_queue import UNIT_SIZE
from mqproc.store.consumequeue.bounds import UNIT_DTYPE
from tests.support.command_line import call
from tests.support.store_builders import QUEUE_FILE_BYTES, SEGMENT, StoppedStore, assert_whole
from tests.support.store_checks import damage_in, flags_of

QUEUE = ("Second", 0)
PER_FILE = QUEUE_FILE_BYTES // UNIT_SIZE


@pytest.mark.parametrize("has_marks", [False, True])
def test_expired_units_of_another_queue_hide_no_record(has_marks: bool, tmp_path: Path) -> None:
    """They remain where the queue's records are damaged, but must not raise its minimum."""
    store = StoppedStore(tmp_path / "store")
    store.segment(0).unlink()
    queues = store.recover().queues()
    store.overwrite(SEGMENT + SEGMENT // 4, bytes(SEGMENT - SEGMENT // 4))
    units = np.zeros(PER_FILE, UNIT_DTYPE)
    units["physical_offset"] = np.arange(PER_FILE) * 1000
    units["size"] = 1000
    assert SEGMENT > PER_FILE * 1000
    store.queue_file(*QUEUE).write_bytes(units.tobytes())
    if has_marks:
        # Otherwise a start accepts the queue, because its last unit is right.
        store.queue_file(*QUEUE, QUEUE_FILE_BYTES).unlink()
    else:
        shutil.rmtree(store.root / "mqproc")
    assert store.recover().queues() == queues
    assert damage_in(call("store", "verify", store.root, "--json", *flags_of(store.engine.options)).json) == []


@pytest.mark.parametrize("first_file", [0, 1])
def test_queue_lost_at_grown_damage_is_rebuilt(first_file: int, tmp_path: Path) -> None:
    """Its units before the new damage must not become fillers."""
    store = StoppedStore(tmp_path / "store")
    damaged = next(at for at in store.offsets if at > 3 * SEGMENT - 8000)
    store.overwrite(damaged + 100, b"\xff")
    shutil.rmtree(store.root / "mqproc" / "marks")
    store.recover()
    os.truncate(store.segment(damaged), SEGMENT - 16_000)
    for number in range(first_file, 2):
        store.queue_file(*QUEUE, number * QUEUE_FILE_BYTES).unlink()
    found = store.recover()
    (hole,) = found.holes
    assert_whole(store, found, lost={number for number, at in enumerate(store.offsets) if hole[0] <= at < hole[1]})


def test_queue_at_repaired_damage_keeps_its_units(tmp_path: Path) -> None:
    """Each queue is checked from its last unit before the damage, or from the log's beginning."""
    store = StoppedStore(tmp_path / "store")
    place = store.offsets[320] + 100
    there = store.segment(place).read_bytes()[place % SEGMENT : place % SEGMENT + 1]
    store.overwrite(place, b"\xff")
    shutil.rmtree(store.root / "mqproc" / "marks")
    assert store.recover().holes
    store.overwrite(place, there)
    found = store.recover()
    assert "lost units" not in found.said_of("queues")
    assert_whole(store, found)
