"""Any file of a store may be empty, short, long, missing or replaced: a start handles it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.store.read.reader import StoreReader
from tests.support.command_line import call
from tests.support.store_builders import SEGMENT, StoppedStore
from tests.support.store_checks import flags_of, is_intact


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 5000)


def put_a_folder_there(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "precious").write_text("kept")


WAYS: tuple[Callable[[Path], None], ...] = (
    lambda path: os.truncate(path, 0),
    cut_off,
    lengthen,
    Path.unlink,
    put_a_folder_there,
)
WAY_NAMES = ("empty", "short", "long", "gone", "folder")
# The first, a middle and the last file of each kind: (folder, which).
PLACES = [(folder, which) for folder in ("commitlog", "consumequeue/First/0", "index") for which in (0, 1, -1)]
OWN = ["marks/commitlog", "marks/consumequeue", "marks/index", "queues", "progress", "settings.json", "opened.json"]
MORE = ["opened.json", "topics.journal", "retention.json", "unconsumed.json"]
FILES = ["checkpoint", "config/topics.json", *(f"mqproc/{name}" for name in OWN)]


@pytest.fixture(scope="module")
def clean_store(tmp_path_factory: pytest.TempPathFactory) -> StoppedStore:
    store = StoppedStore(tmp_path_factory.mktemp("whole") / "store")
    for name in FILES:
        if not (store.root / name).exists():
            (store.root / name).parent.mkdir(exist_ok=True)
            (store.root / name).write_text("{}")
    return store


@pytest.fixture
def store(clean_store: StoppedStore, tmp_path: Path) -> Path:
    shutil.copytree(clean_store.root, tmp_path / "store")
    return tmp_path / "store"


def harm(store: Path, place: str | tuple[str, int], way: Callable[[Path], None]) -> Path:
    path = store / place if isinstance(place, str) else sorted((store / place[0]).iterdir())[place[1]]
    way(path)
    return path


def assert_has_all_that_is_intact(clean_store: StoppedStore, store: Path, intact: set[int]) -> None:
    with StoreReader(store, clean_store.engine.options) as reader:
        assert {message.physical_offset for message in reader.messages()} == intact
    assert intact


@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
@pytest.mark.parametrize("place", [*FILES, *PLACES], ids=str)
def test_start_handles_damage_of_any_file(
    clean_store: StoppedStore, store: Path, place: str | tuple[str, int], way: Callable[[Path], None]
) -> None:
    harm(store, place, way)
    intact = {offset for offset in clean_store.offsets if is_intact(store, offset, SEGMENT)}
    outcome = call("store", "recover", store, "--execute", "--json", *flags_of(clean_store.engine.options))
    assert outcome.code in (0, 1), outcome.err
    assert (outcome.json["executed"], outcome.json["refused"]) == (True, None)
    left = call("store", "verify", store, "--json", *flags_of(clean_store.engine.options)).json["findings"]
    # Unreadable settings are for the operator or a repair to correct.
    assert {each["kind"] for each in left if each["severity"] == "damage"} <= {"config_unreadable"}
    assert_has_all_that_is_intact(clean_store, store, intact)


@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
@pytest.mark.parametrize("place", [*FILES, *PLACES], ids=str)
def test_repair_handles_damage_of_any_file(
    clean_store: StoppedStore, store: Path, place: str | tuple[str, int], way: Callable[[Path], None]
) -> None:
    harm(store, place, way)
    intact = {offset for offset in clean_store.offsets if is_intact(store, offset, SEGMENT)}
    flags = flags_of(clean_store.engine.options)
    assert call("store", "repair", store, "--execute", *flags).code == 0
    assert call("store", "verify", store, *flags).code == 0
    assert_has_all_that_is_intact(clean_store, store, intact)


@pytest.mark.parametrize("name", ["marks/commitlog", "marks/index", "queues", "progress", "settings.json", *MORE])
def test_folder_in_place_of_own_file_is_reported(clean_store: StoppedStore, store: Path, name: str) -> None:
    harm(store, f"mqproc/{name}", put_a_folder_there)
    flags = flags_of(clean_store.engine.options)
    outcome = call("store", "verify", store, "--json", *flags)
    assert outcome.code == 1
    told = [(each["kind"], each["file"]) for each in outcome.json["findings"] if each["severity"] == "damage"]
    assert told == [("misplaced_file", f"mqproc/{name}")]
    found = call("store", "info", store, "--json", *flags).json
    assert found["trouble"] == f"mqproc/{name}: misplaced_file; mqproc store verify shows what to do"
    assert call("store", "repair", store, "--execute", *flags).code == 0
    assert [path.read_text() for path in store.rglob("precious")] == ["kept"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["mqproc/openers.lock", "mqproc/spark.lock"])
def test_lock_that_cannot_be_locked_is_reported_and_moved(
    clean_store: StoppedStore, store: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(store / name)
    flags = flags_of(clean_store.engine.options)
    outcome = call("store", "verify", store, "--json", *flags)
    assert [(each["kind"], each["file"]) for each in outcome.json["findings"]] == [("misplaced_file", name)]
    assert call("store", "repair", store, "--execute", *flags).code == 0
    assert call("store", "verify", store, *flags).code == 0


@pytest.mark.parametrize("name", ["lock", "mqproc/damage.json", *(f"mqproc/{name}" for name in MORE)])
def test_symlink_that_a_start_refuses_is_reported(
    clean_store: StoppedStore, store: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    (store / name).unlink(missing_ok=True)
    (store / name).symlink_to(tmp_path / "elsewhere")
    flags = flags_of(clean_store.engine.options)
    assert call("store", "recover", store, "--execute", *flags).code == 3
    outcome = call("store", "verify", store, "--json", *flags)
    assert [(each["kind"], each["file"]) for each in outcome.json["findings"]] == [("symlink", name)]
    assert call("store", "repair", store, "--execute", *flags).code == 3
    assert (store / name).is_symlink()
