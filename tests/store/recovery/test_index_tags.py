"""An index with entries for tags, as of RocketMQ 5.4, is valid, kept and rebuilt as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mqproc.config.options import Options
from mqproc.layout import index_file
from mqproc.layout.index_file import index_key_hash_of, tag_key
from tests.support.command_line import call
from tests.support.store_builders import ITEMS, TaggedStore, write_at
from tests.support.store_checks import contents, damage_of, recover, verify

# Parts of a log, of which RocketMQ indexed the tags or not: those of 5.3, 5.4 and later, an upgrade, a downgrade.
HISTORIES = {"old": (False,), "new": (True,), "upgraded": (False, True), "downgraded": (True, False)}
PART = 700


@pytest.fixture(params=HISTORIES)
def store(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, tuple[bool, ...], Options]:
    """A closed store, whose files are RocketMQ's, and its history."""
    built = TaggedStore(tmp_path / "store")
    for tags in HISTORIES[request.param]:
        built.add(PART, tags=tags)
    return built.close_as_rocketmq(), HISTORIES[request.param], built.options


Store = tuple[Path, tuple[bool, ...], Options]


def tag_entries(root: Path, options: Options) -> int:
    """Number of entries for tags in a store's index."""
    tag_hash = index_key_hash_of("orders", tag_key("paid"))
    found = 0
    for path in sorted((root / "index").iterdir()):
        data = path.read_bytes()
        for item in range(1, int.from_bytes(data[index_file.ITEM_COUNT : index_file.HEADER_SIZE], "big")):
            place = index_file.item_offset(options.max_hash_slot_num, item)
            found += int.from_bytes(data[place : place + 4], "big") == tag_hash
    return found


@pytest.mark.parametrize("shares", [1, 3])
def test_verify_of_any_history_finds_no_damage(store: Store, shares: int) -> None:
    root, _history, _options = store
    assert damage_of(verify(root, shares=shares)) == []


def test_repair_of_any_history_changes_nothing(store: Store) -> None:
    root, _history, _options = store
    before = contents(root)
    outcome = call("store", "repair", root, "--execute", "--jobs", "1")
    assert (outcome.code, contents(root, without={"lock"})) == (0, before), outcome


def test_recovery_of_any_history_keeps_the_index(store: Store) -> None:
    root, _history, options = store
    before = contents(root / "index")
    found = recover(root, options, clean=True)
    assert found.dispatched == found.end
    assert contents(root / "index") == before


@pytest.mark.parametrize("clean", [True, False])
def test_recovery_without_an_index_makes_that_of_the_last_group(tmp_path: Path, clean: bool) -> None:
    built = TaggedStore(tmp_path / "store").add(PART, tags=True)
    root, options = built.close_as_rocketmq(), built.options
    found = recover(root, options, clean=True)
    assert found.options.message_index_tags
    shutil.rmtree(root / "index")
    recover(root, found.options, clean=clean)
    assert tag_entries(root, options) == PART
    assert damage_of(verify(root)) == []


def test_recovery_after_a_kill_rebuilds_the_index_as_its_newest_part(store: Store) -> None:
    """Without marks nothing vouches for it."""
    root, history, options = store
    recover(root, options, clean=False)
    assert tag_entries(root, options) == (PART * len(history) if history[-1] else 0)
    assert damage_of(verify(root)) == []


def test_recovery_of_keyless_tagged_records_makes_their_entries(tmp_path: Path) -> None:
    """A record with nothing but a tag has an entry, too."""
    built = TaggedStore(tmp_path / "store").add(1, tags=True)
    built.append("orders", [b"x"] * 100, tags=["paid"] * 100)
    root, options = built.close_as_rocketmq(), built.options
    recover(root, options, clean=True)
    assert tag_entries(root, options) == 101


def test_changed_entry_of_a_tag_is_damage_and_repaired(tmp_path: Path) -> None:
    built = TaggedStore(tmp_path / "store").add(PART, tags=True)
    root, options = built.close_as_rocketmq(), built.options
    path = sorted((root / "index").iterdir())[1]
    # Items of a record: two keys, a tag.
    write_at(path, index_file.item_offset(options.max_hash_slot_num, 3 * 20), b"\1\2\3\4")
    assert "entry_wrong" in str(damage_of(verify(root)))
    outcome = call("store", "repair", root, "--execute", "--jobs", "1")
    assert outcome.code == 0, outcome
    assert tag_entries(root, options) == PART
    assert ITEMS > 3 * 20
