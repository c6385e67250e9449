"""Whether an index has entries for tags is found from its own oldest and newest records."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import BadRequestError
from mqproc.io.store_io import StoreIO
from mqproc.layout import checkpoint, index_file
from mqproc.store.cooperative import RecordPage, Slices, finish
from mqproc.store.index.tags import adopted_index_tags, newest_is_indexed, oldest_is_indexed, tags_indexed_from
from mqproc.store.read.queries import StoreQueries
from tests.support.fakes import PAGE, BadSectors
from tests.support.store_builders import TaggedStore, write_at


def evidence(store: TaggedStore) -> tuple[bool | None, bool | None]:
    """Whether the oldest and newest tagged records are indexed."""
    given = store.engine.io, store.engine.paths, store.options
    return oldest_is_indexed(*given), newest_is_indexed(*given)


def adopted(store: TaggedStore, **options: bool) -> bool:
    return adopted_index_tags(store.engine.io, store.engine.paths, dataclasses.replace(store.options, **options))


def indexed_from(store: TaggedStore) -> int | None:
    return finish(tags_indexed_from(store.engine.io, store.engine.paths, store.options))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_evidence_is_that_of_oldest_and_newest_records(tmp_path: Path, first: bool, second: bool) -> None:
    found = TaggedStore(tmp_path).add(700, tags=first).add(300, tags=second)
    assert evidence(found) == (first, second)
    assert adopted(found, message_index_tags=not second) is second


@pytest.mark.parametrize("before", [1, 2, 63, 400, 1500])
@pytest.mark.parametrize("after", [1, 2, 64, 900])
def test_tags_are_indexed_from_the_first_record_with_one(tmp_path: Path, before: int, after: int) -> None:
    """As in a store of RocketMQ 5.3 that 5.4 continued."""
    found = TaggedStore(tmp_path).add(before, tags=False).add(after, tags=True)
    assert indexed_from(found) == found.offsets[before]


def test_tags_are_indexed_from_the_begin_or_not_at_all(tmp_path: Path) -> None:
    assert indexed_from(TaggedStore(tmp_path / "all").add(100, tags=True)) == 0
    assert indexed_from(TaggedStore(tmp_path / "none").add(100, tags=False)) is None
    assert indexed_from(TaggedStore(tmp_path / "until").add(100, tags=True).add(100, tags=False)) is None


def test_evidence_is_found_behind_records_without_a_tag(tmp_path: Path) -> None:
    found = TaggedStore(tmp_path).add(600, tags=True, tag="").add(300, tags=True).add(600, tags=True, tag="")
    assert evidence(found) == (True, True)


def test_evidence_ignores_that_the_newest_record_lacks_an_item(tmp_path: Path) -> None:
    """RocketMQ was killed between two items of a record."""
    found = TaggedStore(tmp_path).add(300, tags=True).add(1, tags=False)
    assert evidence(found) == (True, True)


def test_evidence_ignores_zeros_after_a_power_loss(tmp_path: Path) -> None:
    """An item of zeros seems to belong to the record at offset 0."""
    found = TaggedStore(tmp_path).add(100, tags=True)
    slots = found.options.max_hash_slot_num
    (file,) = found.engine.paths.index.iterdir()
    place = index_file.item_offset(slots, 150)
    write_at(file, place, bytes(file.stat().st_size - place))
    assert evidence(found) == (True, True)


def test_without_evidence_the_option_counts(tmp_path: Path) -> None:
    found = TaggedStore(tmp_path).add(100, tags=False, tag="")
    assert evidence(found) == (None, None)
    assert adopted(found, message_index_tags=True) is True
    assert adopted(found) is False
    assert evidence(found) == (None, None)


def test_without_evidence_the_checkpoint_shows_rocketmq(tmp_path: Path) -> None:
    found = TaggedStore(tmp_path)
    found.engine.paths.checkpoint.write_bytes(checkpoint.encode(checkpoint.Checkpoint(1, 1)))
    assert adopted(found) is False
    write_at(found.engine.paths.checkpoint, checkpoint.LOGICS_PHYSICAL_OFFSET, struct.pack(">q", 77))
    assert adopted(found) is True


def test_without_evidence_the_last_group_counts(tmp_path: Path) -> None:
    """An index that was deleted is built again with the same entries."""
    found = TaggedStore(tmp_path)
    settings = found.engine.paths.settings
    for tags in (True, False):
        settings.write_text(json.dumps({"message_index_tags": tags}))
        assert adopted(found) is tags
    settings.write_text("{")
    assert adopted(found) is False


def test_evidence_of_expired_records_is_ignored(tmp_path: Path) -> None:
    found = TaggedStore(tmp_path).add(900, tags=False).add(900, tags=True)
    found.engine.segments.path(0).unlink()
    begin = found.engine.segments.starts()[0]
    assert found.offsets[0] < begin < found.offsets[900]
    assert evidence(found) == (False, True)
    while found.engine.segments.starts()[0] < found.offsets[900]:
        found.engine.segments.path(found.engine.segments.starts()[0]).unlink()
    assert evidence(found) == (True, True)
    assert indexed_from(found) == 0


@pytest.mark.parametrize("tags", [True, False])
def test_unreadable_files_are_left_out(tmp_path: Path, tags: bool) -> None:
    """Recovery rebuilds them later, with the entries that are found in the others."""
    found = TaggedStore(tmp_path).add(1500, tags=not tags).add(1500, tags=tags).add(1500, tags=tags)
    first, *_others, full, last = sorted(found.engine.paths.index.iterdir())
    io = BadSectors()
    io.lose(first, 0)
    io.lose(full, (full.stat().st_size - 1) // PAGE)
    io.lose(last, 0)
    changed = dataclasses.replace(found.options, message_index_tags=not tags)
    assert adopted_index_tags(io, found.engine.paths, changed) is tags
    assert io.tried == 3


class OpensIO(StoreIO):
    """Counts how often index files are opened."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.opens = folder, 0

    @contextlib.contextmanager
    def opened(self, path: Path, **how: Any) -> Iterator[int]:
        self.opens += path.parent == self.folder
        with super().opened(path, **how) as fd:
            yield fd


def queries(store: TaggedStore, **options: Any) -> tuple[StoreQueries, OpensIO]:
    io = OpensIO(store.engine.paths.index)
    changed = dataclasses.replace(store.options, **options)
    return StoreQueries(io, store.engine.paths, changed, store.view()), io


def search(reading: StoreQueries) -> Slices[RecordPage]:
    return reading.by_tag("orders", "paid", max_messages=10, max_bytes=1 << 20)


@pytest.mark.parametrize("tag", ["", "paid"])
def test_search_of_an_index_without_tags_reads_it_once(tmp_path: Path, tag: str) -> None:
    reading, io = queries(TaggedStore(tmp_path).add(700, tags=False, tag=tag))
    with contextlib.closing(reading):
        opens = []
        for _search in range(3):
            with pytest.raises(BadRequestError, match="message_index_tags"):
                finish(search(reading))
            opens.append(io.opens)
    assert opens == [opens[0]] * 3
    assert opens[0] > 0


def test_search_with_the_option_finds_tags_indexed_later(tmp_path: Path) -> None:
    found = TaggedStore(tmp_path).add(100, tags=False)
    reading, _io = queries(found, message_index_tags=True)
    with contextlib.closing(reading):
        with pytest.raises(BadRequestError, match="no entries for tags"):
            finish(search(reading))
        found.add(50, tags=True)
        with pytest.raises(BadRequestError, match="only of messages stored since"):
            finish(search(reading))


def test_search_for_the_first_indexed_tag_yields(tmp_path: Path) -> None:
    """Other requests are answered meanwhile: a slice reads one window of items."""
    reading, io = queries(TaggedStore(tmp_path).add(1500, tags=True, tag="").add(1, tags=True))
    opens = [0]
    with contextlib.closing(reading):
        for _slice in search(reading):
            opens.append(io.opens)
    window = max(after - before for before, after in itertools.pairwise(opens))
    assert window < io.opens / 4


def test_search_while_retention_deletes_index_files_continues(tmp_path: Path) -> None:
    found = TaggedStore(tmp_path).add(900, tags=True)
    reading, _io = queries(found)
    with contextlib.closing(reading):
        slices = search(reading)
        next(slices)
        min(found.engine.paths.index.iterdir()).unlink()
        assert finish(slices).count == 10
