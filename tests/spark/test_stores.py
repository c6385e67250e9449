"""Finding stores by path, and the end of each log, also with damage there."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mqproc.errors import BadRequestError, CorruptStoreError, StoreAccessError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.spark.segment_bytes import join_path, open_file_system
from mqproc.spark.survey import find_stores
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.durable_marks import DurableMark
from tests.golden.fixtures import GOLDEN, Directory
from tests.spark.support import messages_of, offsets_of
from tests.support.store_builders import SEGMENT, LiveStore, StoppedStore, write_at


def test_store_with_several_paths_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link = tmp_path / "stores" / "s1", tmp_path / "stores" / "a link"
    (real / "commitlog").mkdir(parents=True)
    link.symlink_to(real)
    winding = str(tmp_path / "stores" / ".." / "stores" / "s1")
    monkeypatch.chdir(tmp_path / "stores")
    assert find_stores(["s1", "../stores/s1", str(link)]) == [str(real)]
    assert find_stores([f"{tmp_path}/stores/*"]) == [str(real)]
    assert find_stores([str(link), winding]) == [str(link)]
    assert find_stores([winding, str(link)]) == [winding]


def test_folder_name_with_pattern_characters(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    for name in ("a[1]", "a?", "ab"):
        (tmp_path / name / "commitlog").mkdir(parents=True)
        files.pipe_file(f"/named/{name}/commitlog/{0:020d}", b"")
    assert find_stores([f"{tmp_path}/a[1]", f"{tmp_path}/a?"]) == [f"{tmp_path}/a[1]", f"{tmp_path}/a?"]
    assert find_stores(["memory://named/a[1]", "memory://named/a?"]) == ["memory://named/a[1]", "memory://named/a?"]
    assert find_stores([f"{tmp_path}/a[bc]"]) == [f"{tmp_path}/ab"]
    assert find_stores([f"{tmp_path}/a[{'b' * 300}]"]) == [f"{tmp_path}/ab"]  # longer than any file name may be


def test_folders_as_urls(tmp_path: Path) -> None:
    for scheme in ("file://", "file:", "file://localhost", "FILE://", "File:"):
        assert find_stores([f"{scheme}{tmp_path}"]) == [str(tmp_path)]
    assert find_stores(["memory://profile:/one"]) == ["memory://profile:/one"], "only a URL's beginning is its scheme"


def test_root_of_file_system_may_be_a_store() -> None:
    _files, root = open_file_system("local:///")
    assert join_path(root, "commitlog") == "/commitlog"


def test_stores_in_an_archive(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    with zipfile.ZipFile(tmp_path / "stores.zip", "w") as archive:
        for file in (store.root / "commitlog").iterdir():
            for folder in ("", "one/", "two/"):
                archive.write(file, f"{folder}commitlog/{file.name}")
    url = f"::{tmp_path}/stores.zip"
    expected = offsets_of(store.root)
    assert offsets_of(f"zip://{url}") == expected, "an archive's own folder is called nothing"
    assert find_stores([f"zip://*{url}"]) == [f"zip://one{url}", f"zip://two{url}"]
    assert offsets_of(f"zip://*{url}") == sorted(expected * 2)


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("lacking://bucket/store", StoreAccessError, "pip install lackingfs"),
        ("dir:///store", BadRequestError, "incomplete for fsspec"),
        ("reference://store", BadRequestError, "incomplete for fsspec: .*missing 1 required"),
        ("zip://::/nothing.zip", StoreAccessError, "No such file or directory: '/nothing.zip'"),
        ("nope://store", BadRequestError, "Protocol not known: nope"),
        ("refusing://store", StoreAccessError, "denied$"),
        ("refusing://store*", StoreAccessError, "denied$"),
        ("zip://::broken.zip", StoreAccessError, "File is not a zip file"),
        ("zip://*::broken.zip", StoreAccessError, "File is not a zip file"),
    ],
)
def test_unreachable_storage_error_is_one_line(
    url: str, kind: type[Exception], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.zip").write_bytes(b"x" * 100)
    missing = "pip install lackingfs"
    fsspec.register_implementation("lacking", "lackingfs.FileSystem", clobber=True, errtxt=missing)
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    with pytest.raises(kind, match=rf"(?s)^{re.escape(url)}: [^\n]*{says}[^\n]*$"):
        offsets_of(url)


class Refusing(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Storage whose package raises its own errors, with several lines."""

    protocol = "refusing"

    def info(self, path: str, **given: Any) -> dict[str, Any]:
        raise RuntimeError(f"{path}: denied\nfor many reasons")

    def ls(self, path: str, detail: bool = True, **given: Any) -> list[Any]:
        return list(self.info(path))

    def isdir(self, path: str) -> bool:
        return bool(self.info(path))


def with_zeros_in_place_of_one(root: Path) -> tuple[LiveStore, list[int], int]:
    """A closed store of 300 messages in one segment, their positions, and the lost message."""
    store = LiveStore(root)
    store.append("Topic", [b"%d" % number * 20 for number in range(300)], queues=1)
    store.close()
    places, lost = offsets_of(root), 150
    assert len(places) == 300
    write_at(root / "commitlog" / f"{0:020d}", places[lost], bytes(places[lost + 1] - places[lost]))
    return store, places, lost


def test_records_after_zeros_raise_or_are_read(tmp_path: Path) -> None:
    _store, places, lost = with_zeros_in_place_of_one(tmp_path)
    says = rf"the log ends at {places[lost]:,} \(zeros\), but a record follows at {places[lost + 1]:,}"
    for given in ({}, {"verifyCrc": True}, {"splitBytes": 5_000}):
        with pytest.raises(CorruptStoreError, match=says):
            offsets_of(tmp_path, **given)
        assert offsets_of(tmp_path, failOnDataLoss=False, **given) == places[:lost] + places[lost + 1 :]


def test_records_after_end_of_closed_store_are_ignored(tmp_path: Path) -> None:
    store, places, lost = with_zeros_in_place_of_one(tmp_path)
    io, paths, size = StoreIO(), StorePaths(tmp_path), store.options.mapped_file_size_commit_log
    mark = DurableMark(io, paths.mark("commitlog"), LogSegments(io, paths.commit_log, size))
    assert mark.move(places[lost], 1)
    assert offsets_of(tmp_path) == places[:lost]
    paths.abort.write_text("1")
    says = rf"the log ends at {places[lost]:,} \(zeros\), but a record follows at {places[lost + 1]:,}"
    with pytest.raises(CorruptStoreError, match=says):
        offsets_of(tmp_path)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_zeros_in_undispatched_log(tmp_path: Path, share: float) -> None:
    name = "c2_killed_dispatch_behind"
    store = Directory(GOLDEN, name, name, "before").unpack(tmp_path)
    places = offsets_of(store)
    last = [place for place in places if place >= places[-1] // SEGMENT * SEGMENT]
    harmed, following = last[int(len(last) * share) :][:2]
    write_at(store / "commitlog" / f"{harmed // SEGMENT * SEGMENT:020d}", harmed % SEGMENT, bytes(following - harmed))
    with pytest.raises(CorruptStoreError, match="failOnDataLoss=false"):
        offsets_of(store)
    assert offsets_of(store, failOnDataLoss=False) == [place for place in places if place != harmed]


def test_log_without_valid_first_record(tmp_path: Path) -> None:
    """A partial first record after a kill is neither part of the log nor damage."""
    whole = StoppedStore(tmp_path / "whole")
    first = whole.segment(0).read_bytes()[: whole.offsets[1]]
    for number, start, begin, says in (
        (0, 0, b"", ""),
        (1, 0, first[: len(first) // 2], ""),
        (2, 0, first[:30], ""),
        (3, 0, b"noise", "bad magic"),
        (4, SEGMENT, first, "bad offset"),
    ):
        store = tmp_path / str(number)
        (store / "commitlog").mkdir(parents=True)
        (store / f"commitlog/{start:020d}").write_bytes(begin + bytes(SEGMENT - len(begin)))
        if says:
            with pytest.raises(CorruptStoreError, match=rf"no intact record and does not begin with one \({says}\)"):
                offsets_of(store)
        assert offsets_of(store, failOnDataLoss=not says) == []


@pytest.mark.parametrize("length", [0, 5_000, 30_001])
def test_short_segment_is_read(tmp_path: Path, length: int) -> None:
    store = StoppedStore(tmp_path / "store")
    everything = messages_of(store.root)
    places = [message.physical_offset for message in everything]
    for start in (0, places[-1] // SEGMENT * SEGMENT):
        whole = store.segment(start).read_bytes()
        os.truncate(store.segment(start), length)
        ends = dict(itertools.pairwise([*places, store.end]))
        there = [place for place in places if place // SEGMENT * SEGMENT != start or ends[place] <= start + length]
        with pytest.raises(
            CorruptStoreError, match=rf"segment {start:020d} has {length:,} bytes; a segment has 65,536; fail"
        ):
            offsets_of(store.root)
        for given in ({}, {"splitBytes": 3_000}, {"startingTimestamp": everything[3].store_timestamp_ms}):
            assert offsets_of(store.root, failOnDataLoss=False, **given) == there
        of_topic = {message.physical_offset for message in everything if message.topic == "First"}
        assert offsets_of(store.root, topic="First", key="n0", failOnDataLoss=False) == places[:1] * (
            places[0] in there
        )
        assert offsets_of(store.root, topic="First", failOnDataLoss=False) == [
            each for each in there if each in of_topic
        ]
        store.segment(start).write_bytes(whole)


def test_zeros_at_start_of_last_segment_on_remote_storage(rolled_store: Path) -> None:
    places = offsets_of(rolled_store)
    last = places[-1] // SEGMENT * SEGMENT
    files = fsspec.filesystem("memory")
    for file in (rolled_store / "commitlog").iterdir():
        if file.name.isdigit():
            data = file.read_bytes()
            harmed = next(place for place in places if place > last) - last if int(file.name) == last else 0
            files.pipe_file(f"/zeros/store/commitlog/{file.name}", bytes(harmed) + data[harmed:])
    with pytest.raises(CorruptStoreError, match=r"no intact record in bytes \[0, .*: zeros; failOnDataLoss=false"):
        offsets_of("memory://zeros/store")
    assert offsets_of("memory://zeros/store", failOnDataLoss=False) == [place for place in places if place != last]


def test_log_shorter_than_durable_mark_raises(tmp_path: Path) -> None:
    store = StoppedStore(tmp_path / "store")
    shutil.rmtree(store.root / "consumequeue")
    places = offsets_of(store.root)
    store.overwrite(places[-20], bytes(store.end - places[-20]))
    says = rf"the log ends at {places[-20]:,}, but mqproc/marks/commitlog knows it up to {store.end:,}"
    with pytest.raises(CorruptStoreError, match=says):
        offsets_of(store.root)
    assert offsets_of(store.root, failOnDataLoss=False) == places[:-20]
