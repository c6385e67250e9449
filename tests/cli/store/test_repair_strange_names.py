"""Unexpected names and kinds of files in a store are ignored or quarantined; tools continue."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import call
from tests.support.store_builders import StoppedStore, assert_whole
from tests.support.store_checks import contents, damage_in, flags_of

NO_TEXT = b"consumequeue/\xff\xfe/0"


@pytest.fixture
def store(tmp_path: Path) -> StoppedStore:
    return StoppedStore(tmp_path / "store")


@pytest.fixture
def flags(store: StoppedStore) -> list[str]:
    return flags_of(store.engine.options)


def test_folder_with_name_not_utf8_is_ignored(store: StoppedStore, flags: list[str]) -> None:
    os.makedirs(os.fsencode(store.root) + b"/" + NO_TEXT)
    found = store.recover(clean=False)
    assert_whole(store, found)
    assert any(r"consumequeue/\xff\xfe: not a file of the store, left alone" in line for line in found.said)
    assert os.path.isdir(os.fsencode(store.root) + b"/" + NO_TEXT)
    for command in (["verify"], ["recover", "--dry-run"], ["repair"], ["info"], ["retention"]):
        outcome = call("store", command[0], store.root, *command[1:], *flags, "--json")
        assert (outcome.code, outcome.json != {}) == (0, True), outcome.err
    (note,) = [each for each in call("store", "verify", store.root, *flags, "--json").json["findings"] if each["file"]]
    assert note["file"] == r"consumequeue/\xff\xfe"


@pytest.mark.parametrize("name", ["consumequeue", "index"])
def test_file_in_place_of_folder_is_quarantined(store: StoppedStore, flags: list[str], name: str) -> None:
    shutil.rmtree(store.root / name)
    (store.root / name).write_bytes(b"no folder")
    verified = call("store", "verify", store.root, *flags, "--json")
    assert verified.code == 1
    assert (name, "misplaced_file") in {(each["file"], each["kind"]) for each in verified.json["findings"]}
    assert call("store", "recover", store.root, "--dry-run", *flags).code == 0
    assert (store.root / name).read_bytes() == b"no folder", "so far nothing has changed"
    assert_whole(store, store.recover(clean=False))
    assert (store.root / "mqproc" / "aside" / name).read_bytes() == b"no folder"
    assert call("store", "verify", store.root, *flags).code == 0


@pytest.mark.parametrize("name", ["commitlog", "config"])
def test_file_in_place_of_commitlog_is_refused(store: StoppedStore, flags: list[str], name: str) -> None:
    shutil.rmtree(store.root / name)
    (store.root / name).write_bytes(b"no folder")
    before = contents(store.root)
    for command in ("verify", "recover", "repair"):
        outcome = call("store", command, store.root, *flags)
        assert outcome.code == 3
        assert name in outcome.err
    assert contents(store.root) == before


def test_folder_named_like_an_index_file_is_ignored(store: StoppedStore, flags: list[str]) -> None:
    (store.root / "index" / "20200101000000000").mkdir()
    assert call("store", "retention", store.root, "--older-than", "1s", *flags).code == 0


def test_lost_durable_messages_are_damage(store: StoppedStore, flags: list[str]) -> None:
    assert call("store", "recover", store.root, "--dry-run", *flags).code == 0
    for path in (store.root / "commitlog").iterdir():
        os.truncate(path, 0)
    outcome = call("store", "recover", store.root, "--dry-run", *flags, "--json")
    assert (outcome.code, outcome.json["lost"][0]["durable_end"]) == (0, store.end)
    assert f"was durable up to {store.end:,}" in call("store", "recover", store.root, *flags).out


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("commitlog/00000000000000524288", "misplaced_file"),
        ("consumequeue/First/0/00000000000000002400", "misplaced_file"),
        ("index/20300101000000000", "misplaced_file"),
        ("config/topics.json", "misplaced_file"),
        ("checkpoint", "misplaced_file"),
        ("mqproc/damage.json", "ledger_unreadable"),
        ("mqproc/marks/index", "misplaced_file"),
        ("mqproc/marks", "misplaced_file"),
        ("timerwheel", "misplaced_file"),
        ("mqproc/control", "misplaced_file"),
        ("mqproc/errors", "misplaced_file"),
        ("mqproc/log.jsonl", "misplaced_file"),
        ("mqproc/queues.next", "misplaced_file"),
    ],
)
def test_pipe_in_place_of_file_is_quarantined(store: StoppedStore, flags: list[str], file: str, kind: str) -> None:
    store.recover()
    path = store.root / file
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.mkfifo(path)
    found = call("store", "verify", store.root, *flags, "--json")
    assert (found.code, kind) == (1, next(each["kind"] for each in found.json["findings"] if each["file"] == file))
    for command in (["info"], ["retention"], ["recover", "--dry-run"]):
        assert call("store", command[0], store.root, *command[1:], *flags).code == 0
    assert call("store", "repair", store.root, "--execute", *flags).code == 0
    assert not (store.root / file).is_fifo()
    assert call("store", "verify", store.root, *flags).code == 0


@pytest.mark.parametrize("name", ["ctl.sock", "query.sock", "writer.sock"])
def test_folder_in_place_of_socket_is_quarantined(store: StoppedStore, flags: list[str], name: str) -> None:
    store.recover()
    path = store.root / "mqproc" / name
    path.mkdir()
    found = call("store", "verify", store.root, *flags, "--json")
    assert [(row.kind, row.file) for row in damage_in(found.json)] == [("misplaced_file", f"mqproc/{name}")]
    assert call("store", "repair", store.root, "--execute", *flags).code == 0
    assert not path.exists()


def folder_at(path: Path) -> None:
    path.mkdir()


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.fspath(path))


@pytest.mark.parametrize("make", [folder_at, os.mkfifo, socket_at])
def test_lock_that_is_not_a_file_is_reported(
    store: StoppedStore, flags: list[str], make: Callable[[Path], None]
) -> None:
    """No group can start and nothing can be repaired, so repair does not claim success."""
    (store.root / "lock").unlink(missing_ok=True)
    make(store.root / "lock")
    assert call("store", "info", store.root, *flags).code == 0
    found = call("store", "verify", store.root, *flags, "--json").json
    assert ("lock_misplaced", "lock") in [(row.kind, row.file) for row in damage_in(found)]
    assert call("store", "repair", store.root, *flags, "--json").json["actions"] == []
    assert "move it away by hand" in call("doctor", "--store", store.root).out
    refused = call("store", "repair", store.root, "--execute", *flags)
    assert (refused.code, refused.err) == (3, f"mqproc: {store.root}/lock: not a file\n")


def test_log_that_is_a_device_is_accepted(store: StoppedStore, flags: list[str]) -> None:
    """A start accepts it: this disables the log."""
    (store.root / "mqproc" / "log.jsonl").symlink_to("/dev/null")
    assert call("store", "verify", store.root, *flags).code == 0
    assert call("store", "repair", store.root, "--execute", *flags).code == 0
    assert (store.root / "mqproc" / "log.jsonl").is_symlink()


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo], ids=["file", "pipe"])
@pytest.mark.parametrize("folder", ["mqproc", "config", "commitlog"])
def test_non_folder_in_place_of_folder_is_reported(
    store: StoppedStore, flags: list[str], folder: str, make: Callable[[Path], None]
) -> None:
    path = store.root / folder
    shutil.rmtree(path, ignore_errors=True)
    make(path)
    reported = (
        f"{store.root}: not a store: it has no folder {folder}" if folder == "commitlog" else f"{path}: not a folder"
    )
    for command in (["verify"], ["info"], ["dump"], ["repair"], ["recover", "--dry-run"]):
        found = call("store", command[0], store.root, *command[1:], *flags)
        assert (found.code, found.err) == (3, f"mqproc: {reported}\n"), command


@pytest.mark.parametrize("name", ["consumequeue/First", "consumequeue/First/0", "consumequeue/Another"])
@pytest.mark.parametrize("repairs", [False, True], ids=["start", "repair"])
def test_file_in_place_of_queue_folder_is_quarantined(
    store: StoppedStore, flags: list[str], name: str, *, repairs: bool
) -> None:
    """No unit could be stored below it, for any topic: dispatch waits for that one."""
    path = store.root / name
    if path.exists():
        shutil.rmtree(path)
    path.write_bytes(b"mine")
    found = call("store", "verify", store.root, *flags, "--json").json["findings"]
    assert (name, "misplaced_file") in {(each["file"], each["kind"]) for each in found}
    if repairs:
        assert call("store", "repair", store.root, *flags, "--execute").code == 0
    else:
        assert_whole(store, store.recover())
    aside = [each for each in (store.root / "mqproc").rglob("*") if each.is_file()]
    assert sum(each.read_bytes() == b"mine" for each in aside) == 1
    assert call("store", "verify", store.root, *flags).code == 0
    assert_whole(store, store.recover())
