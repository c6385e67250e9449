"""Segments whose names do not match their records.

Verify reports them first; repair and a start rename them, so that nothing is lost.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from mqproc import StoreReader
from mqproc.io.store_io import StoreIO
from mqproc.layout.record import BLANK_SIZE, PHYSICAL_OFFSET
from mqproc.layout.record_codec import encode_blank
from mqproc.paths import segment_name
from mqproc.store.commitlog.misnamed_segments import claimed_start, find_misnamed
from tests.support.command_line import call
from tests.support.store_builders import SEGMENT, StoppedStore
from tests.support.store_checks import damage_in, flags_of, repair

NAMES = [segment_name(start) for start in range(0, 5 * SEGMENT, SEGMENT)]
# New name of each renamed file.
WRONG = {
    "two have each other's": {NAMES[1]: NAMES[2], NAMES[2]: NAMES[1]},
    "three in a ring": {NAMES[0]: NAMES[1], NAMES[1]: NAMES[3], NAMES[3]: NAMES[0]},
    "from the second on": {NAMES[1]: NAMES[2], NAMES[2]: NAMES[3], NAMES[3]: NAMES[4]},
    "all of them": dict(itertools.pairwise(NAMES)),
    "the last": {NAMES[3]: NAMES[4]},
    "where no segment begins": {NAMES[1]: segment_name(SEGMENT + 1)},
    "a copy's name": {NAMES[3]: f"{NAMES[3]} (1)"},
    "left by a killed repair": {NAMES[1]: f"{NAMES[1]}.misnamed", NAMES[2]: f"{NAMES[2]}.misnamed"},
}


@pytest.fixture(scope="module")
def clean_store(tmp_path_factory: pytest.TempPathFactory) -> StoppedStore:
    """A clean, cleanly stopped store."""
    store = StoppedStore(tmp_path_factory.mktemp("whole") / "store")
    store.close_in_order()
    return store


def rename(store: Path, names: Mapping[str, str]) -> None:
    log = store / "commitlog"
    for old in names:
        (log / old).rename(log / f"was {old}")
    for old, new in names.items():
        (log / f"was {old}").rename(log / new)


def log_of(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (store / "commitlog").iterdir()}


def places(store: Path) -> list[int]:
    with StoreReader(store) as reader:
        return sorted(message.physical_offset for message in reader.messages())


@pytest.mark.parametrize("names", WRONG.values(), ids=WRONG)
def test_repair_renames_segments(clean_store: StoppedStore, tmp_path: Path, names: Mapping[str, str]) -> None:
    store, flags = tmp_path / "store", flags_of(clean_store.engine.options)
    shutil.copytree(clean_store.root, store)
    rename(store, names)
    verified = call("store", "verify", store, "--json", *flags)
    first = verified.json["findings"][: len(names)]
    assert {each["kind"] for each in first} == {"segment_misnamed"}
    assert {each["file"]: each["text"] for each in first} == {
        f"commitlog/{new}": f"its records belong to commitlog/{old}" for old, new in names.items()
    }
    others = [row for row in damage_in(verified.json) if row.kind != "segment_misnamed"]
    assert not [
        row
        for row in others
        if row.file in {f"commitlog/{new}" for new in names.values()}
        and row.kind in ("record_offset", "stray_file", "misplaced_file")
    ]
    repair(store, flags)
    assert log_of(store) == log_of(clean_store.root)
    assert places(store) == places(clean_store.root)


@pytest.mark.parametrize("was_killed", [False, True], ids=["closed in order", "killed"])
@pytest.mark.parametrize(
    "names", [WRONG[name] for name in ("from the second on", "all of them", "the last", "left by a killed repair")]
)
def test_start_renames_segments_instead_of_cutting(
    clean_store: StoppedStore, tmp_path: Path, names: Mapping[str, str], *, was_killed: bool
) -> None:
    store, flags = tmp_path / "store", flags_of(clean_store.engine.options)
    shutil.copytree(clean_store.root, store)
    if was_killed:
        (store / "abort").write_text("1")
    rename(store, names)
    done = call("store", "recover", store, "--execute", *flags)
    assert done.code == 0
    for old, new in names.items():
        assert f"commitlog/{new}: its records belong to {old}, renamed" in done.out + done.err
    assert log_of(store) == log_of(clean_store.root)
    assert call("store", "verify", store, *flags).code == 0
    assert "renamed" not in call("store", "recover", store, "--execute", *flags).out


def test_second_copy_of_a_segment_is_quarantined(clean_store: StoppedStore, tmp_path: Path) -> None:
    store, flags = tmp_path / "store", flags_of(clean_store.engine.options)
    shutil.copytree(clean_store.root, store)
    shutil.copy(store / "commitlog" / NAMES[1], store / "commitlog" / NAMES[2])
    verified = call("store", "verify", store, "--json", *flags)
    assert verified.json["findings"][0]["text"] == f"its records belong to commitlog/{NAMES[1]}, which exists"
    done = repair(store, flags)
    assert (store / done.json["kept_in"] / "files" / "commitlog" / NAMES[2]).is_file()
    assert places(store) == [place for place in places(clean_store.root) if place // SEGMENT != 2]


def test_segment_with_damaged_first_record_keeps_its_name(clean_store: StoppedStore, tmp_path: Path) -> None:
    store, flags = tmp_path / "store", flags_of(clean_store.engine.options)
    shutil.copytree(clean_store.root, store)
    rename(store, {NAMES[3]: NAMES[4]})
    with (store / "commitlog" / NAMES[4]).open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\xfe\xfd")
    verified = call("store", "verify", store, "--json", *flags)
    assert "segment_misnamed" not in {row.kind for row in damage_in(verified.json)}


@pytest.mark.parametrize("command", ["repair", "recover"])
@pytest.mark.parametrize("at", [SEGMENT, 2 * SEGMENT])
def test_flipped_bit_in_first_offset_keeps_the_segment_name(tmp_path: Path, command: str, at: int) -> None:
    """No CRC of RocketMQ covers it: the segment was renamed away, or the log was cut there."""
    clean_store = StoppedStore(tmp_path / "store", enabled_append_prop_crc=False)
    clean_store.close_in_order()
    store, flags, before = clean_store.root, flags_of(clean_store.engine.options), places(clean_store.root)
    clean_store.overwrite(at + PHYSICAL_OFFSET, (at + (1 << 24)).to_bytes(8, "big"))
    # A start that finds damage ends with 1. Durable marks show a start that the log is complete to its end.
    shutil.rmtree(store / "mqproc")
    (store / "abort").touch()
    assert call("store", command, store, "--execute", *flags).code == (command == "recover")
    assert places(store) == [place for place in before if place != at]


@pytest.mark.parametrize(("number", "told"), [(0, None), (1, 0)])
def test_segment_name_check_reads_records_only(
    clean_store: StoppedStore, tmp_path: Path, number: int, told: int | None
) -> None:
    """A BLANK, or damage, may be as long as a segment, which need not fit into memory."""

    class ShortReads(StoreIO):
        def pread(self, fd: int, size: int, offset: int) -> bytes:
            assert size < SEGMENT // 2
            return super().pread(fd, size, offset)

    data = bytearray((clean_store.root / "commitlog" / NAMES[0]).read_bytes())
    at = number * int.from_bytes(data[:4], "big")
    data[at : at + BLANK_SIZE] = encode_blank(SEGMENT - at)
    (tmp_path / NAMES[0]).write_bytes(data)
    assert claimed_start(ShortReads(), tmp_path / NAMES[0], SEGMENT) == told


@pytest.mark.parametrize("command", ["repair", "recover"])
@pytest.mark.parametrize("name", [NAMES[4], f"{NAMES[3]} (1)", f"{NAMES[3]}.misnamed"])
def test_empty_segment_gives_up_its_name(clean_store: StoppedStore, tmp_path: Path, command: str, name: str) -> None:
    """Like an abandoned copy: the log was cut before it, to continue there."""
    store, flags = tmp_path / "store", flags_of(clean_store.engine.options)
    shutil.copytree(clean_store.root, store)
    rename(store, {NAMES[3]: name})
    (store / "commitlog" / NAMES[3]).touch()
    assert call("store", command, store, "--execute", *flags).code == 0
    assert log_of(store) == log_of(clean_store.root)
    assert places(store) == places(clean_store.root)


@pytest.mark.parametrize("command", ["repair", "recover"])
@pytest.mark.parametrize("killed", [False, True])
def test_unwritten_segment_gives_up_its_name(
    clean_store: StoppedStore, tmp_path: Path, command: str, *, killed: bool
) -> None:
    """The last segment and the preallocated one are exchanged: a start removed the last."""
    store, flags = tmp_path / "store", flags_of(clean_store.engine.options)
    shutil.copytree(clean_store.root, store)
    (store / "commitlog" / NAMES[4]).touch()
    os.truncate(store / "commitlog" / NAMES[4], SEGMENT)
    if killed:
        (store / "abort").touch()
    rename(store, {NAMES[3]: NAMES[4], NAMES[4]: NAMES[3]})
    assert call("store", command, store, "--execute", *flags).code == 0
    assert places(store) == places(clean_store.root)
    assert call("store", "verify", store, *flags).code == 0


def test_segment_deleted_on_nfs_is_no_damage(clean_store: StoppedStore, tmp_path: Path) -> None:
    """A program has it open: it must neither be renamed back nor count as damage."""
    store = tmp_path / "store"
    shutil.copytree(clean_store.root, store)
    log = store / "commitlog"
    shutil.copy(log / NAMES[1], log / ".nfs000000000000002a00000001")
    verified = call("store", "verify", "--store", store, "--json")
    assert verified.code == 0, verified.out
    (found,) = [finding for finding in verified.json["findings"] if ".nfs" in finding["file"]]
    assert (found["kind"], found["severity"]) == ("stray_file", "note")
    (log / NAMES[0]).rename(log / ".nfs000000000000002a00000002")
    assert find_misnamed(StoreIO(), log, SEGMENT) == []
