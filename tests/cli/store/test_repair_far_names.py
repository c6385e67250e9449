"""Files far beyond the expected sequence, and records with far queue offsets.

The gap would need millions of files; nothing may visit them one by one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mqproc import StoreReader
from mqproc.layout import record
from mqproc.layout.consume_queue import QUEUE_OFFSET_LIMIT
from mqproc.paths import segment_name, segment_start
from mqproc.store.verify.findings import LISTED_MAX
from tests.support.command_line import call
from tests.support.store_builders import QUEUE_FILE_BYTES, SEGMENT, StoppedStore, write_at
from tests.support.store_checks import damage_in, flags_of, repair

LOG, QUEUE = "commitlog", "consumequeue/First/0"
# Each is a multiple of the file size, but not reachable; the last two exceed the range of offsets.
FAR = [
    (QUEUE, QUEUE_FILE_BYTES << 35),
    (LOG, SEGMENT << 34),
    (QUEUE, QUEUE_FILE_BYTES * (10**20 // QUEUE_FILE_BYTES - 1)),
    (LOG, (1 << 63) - SEGMENT),
]


@pytest.fixture(scope="module")
def clean_store(tmp_path_factory: pytest.TempPathFactory) -> StoppedStore:
    """A clean, cleanly stopped store."""
    store = StoppedStore(tmp_path_factory.mktemp("whole") / "store")
    store.close_in_order()
    return store


def misplaced(clean_store: StoppedStore, store: Path, folder: str, start: int) -> str:
    """A copy of the store in which the first file exists once more, far beyond the last."""
    shutil.copytree(clean_store.root, store)
    shutil.copy(store / folder / segment_name(0), store / folder / segment_name(start))
    return f"{folder}/{segment_name(start)}"


def places(store: Path) -> list[int]:
    with StoreReader(store) as reader:
        return sorted(message.physical_offset for message in reader.messages())


def test_segment_start_may_exceed_offsets() -> None:
    assert segment_start(segment_name((1 << 62) - 1)) == (1 << 62) - 1
    assert segment_start(segment_name(1 << 62)) is None


@pytest.mark.parametrize(("folder", "start"), FAR)
def test_repair_moves_far_file_and_keeps_the_rest(
    clean_store: StoppedStore, tmp_path: Path, folder: str, start: int
) -> None:
    store, flags = tmp_path / "store", flags_of(clean_store.engine.options)
    name = misplaced(clean_store, store, folder, start)
    outcome = call("store", "verify", store, "--json", *flags)
    assert outcome.code == 1
    assert name in {row.file for row in damage_in(outcome.json)}
    assert call("store", "info", store, *flags).code in (0, 1)
    repair(store, flags)
    assert not (store / name).exists()
    assert places(store) == places(clean_store.root)


@pytest.mark.parametrize(("folder", "start"), FAR[:2])
def test_start_moves_far_file_and_keeps_the_rest(
    clean_store: StoppedStore, tmp_path: Path, folder: str, start: int
) -> None:
    store, flags = tmp_path / "store", flags_of(clean_store.engine.options)
    name = misplaced(clean_store, store, folder, start)
    assert call("store", "recover", store, "--execute", *flags).code in (0, 1)
    assert not (store / name).exists()
    assert places(store) == places(clean_store.root)


def test_verify_far_file_lists_few_findings(clean_store: StoppedStore, tmp_path: Path) -> None:
    folder, start = FAR[0]
    misplaced(clean_store, tmp_path / "store", folder, start)
    found = call("store", "verify", tmp_path / "store", "--json", *flags_of(clean_store.engine.options)).json
    assert found["counts"]["queue_file_missing"] == LISTED_MAX + 1


@pytest.mark.parametrize("queue_offset", [QUEUE_OFFSET_LIMIT, (1 << 63) - 1])
def test_impossible_queue_offset_is_damage(tmp_path: Path, queue_offset: int) -> None:
    """The record has no CRC over all of it, as in RocketMQ; its neighbours stay."""
    clean_store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    clean_store.close_in_order()
    flags, offset = flags_of(clean_store.engine.options), clean_store.offsets[40]
    before = places(clean_store.root)
    write_at(clean_store.segment(offset), offset % SEGMENT + record.QUEUE_OFFSET, queue_offset.to_bytes(8, "big"))
    found = damage_in(call("store", "verify", clean_store.root, "--json", *flags).json)
    assert [row.physical_offset for row in found if row.kind == "record_queue"] == [offset]
    repair(clean_store.root, flags)
    assert places(clean_store.root) == [place for place in before if place != offset]


def test_repair_does_not_fill_an_implausible_gap(tmp_path: Path) -> None:
    """A wrong but possible queue offset: repair terminates, and creates no files for the gap."""
    clean_store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    clean_store.close_in_order()
    flags, offset = flags_of(clean_store.engine.options), clean_store.offsets[40]
    write_at(clean_store.segment(offset), offset % SEGMENT + record.QUEUE_OFFSET, (1 << 40).to_bytes(8, "big"))
    files = len(list((clean_store.root / "consumequeue").rglob("*")))
    assert call("store", "repair", clean_store.root, "--execute", *flags).code == 1
    assert len(list((clean_store.root / "consumequeue").rglob("*"))) <= files + 1
