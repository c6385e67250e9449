"""Stores with features of RocketMQ that mqproc does not read.

The golden stores were written by brokers of release 5.5.0 with these features.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.config.options import Options
from mqproc.errors import StartError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.recovery.repair import run_recovery
from mqproc.store.unsupported import find_unsupported, refuse_unsupported
from tests.golden.fixtures import GOLDEN, load_store
from tests.roles.rigs import Rig
from tests.support.command_line import call
from tests.support.fork_server import run_forked
from tests.support.group import Group
from tests.support.store_checks import contents

STORES = {
    "l_kvstore": ("kvStore", "popConsumerKVServiceEnable"),
    "m_rocksdb_transactions": ("consumequeue/RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC", "transRocksDBEnable"),
    "n_rocksdb_timer": ("rocksdbstore", "timerRocksDBEnable"),
}


@pytest.fixture(params=STORES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, str]:
    """A store of RocketMQ 5.5.0, the part that shows its feature, and the feature's option."""
    return load_store(request.param, tmp_path, GOLDEN / "5.5.0"), *STORES[request.param]


Case = tuple[Path, str, str]


def test_up_refuses_rocksdb_state_store_unchanged(case: Case) -> None:
    store, part, option = case
    before = contents(store, without=())
    # Not in this process: as a subreaper it would keep orphans of later tests as zombies.
    done = run_forked(["mqproc", "up", "--store", str(store), "--set", "metrics_port=0"])
    assert done.returncode == 3
    assert f"{store / part}: " in done.stderr
    assert f"({option}), which mqproc does not read" in done.stderr
    assert "--ignore-kvstore" in done.stderr
    after = contents(store, without=())
    assert {name: after[name] for name in before if name != "lock"} == {
        name: before[name] for name in before if name != "lock"
    }


def test_up_ignore_kvstore_starts_and_reports_it(case: Case) -> None:
    store, part, option = case
    group = Group(store, metrics_port=0, ignore_kvstore=True, file_reserved_time=1 << 20)
    try:
        group.start()
        assert f"{store / part}: " in (text := group.output.read_text())
        assert f"({option}), which mqproc does not read; ignored: " in text
    finally:
        group.close()


def test_store_commands_name_the_unsupported_part(case: Case) -> None:
    store, part, option = case
    verified = call("store", "verify", store, "--json")
    assert [
        (finding["kind"], option in finding["text"]) for finding in verified.json["findings"] if finding["file"] == part
    ] == [("not_checked", True)]
    assert option in call("store", "info", store, "--json").json["trouble"]
    findings = call("doctor", "--store", store, "--json").json["findings"]
    (finding,) = (each for each in findings if each["check"] == "unsupported")
    assert finding["level"] == "error"
    assert option in finding["found"]
    assert "--ignore-kvstore" in finding["mend"]
    ignored = call("doctor", "--store", store, "--json", "--set", "ignore_kvstore=true").json["findings"]
    assert [each["level"] for each in ignored if each["check"] == "unsupported"] == ["warning"]


def test_recovery_and_repair_of_rocksdb_state_work(case: Case) -> None:
    """They change nothing of it: only a start of a group is refused."""
    store, part, _ = case
    before = {path: path.read_bytes() for path in (store / part).rglob("*") if path.is_file()}
    run_recovery(StoreIO(), StorePaths(store), Options())
    assert {path: path.read_bytes() for path in before} == before


# Other traces, made by hand


def make_file(path: Path, data: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda root: make_file(root / "kvStore/000004.log"), "popConsumerKVServiceEnable"),
        (lambda root: make_file(root / "kvStore/000011.sst"), "popConsumerKVServiceEnable"),
        (lambda root: make_file(root / "rocksdbstore/000004.log", b"\x05\x01" + b"sys_topic_scan_offset_checkpoint"),
         "timerRocksDBEnable"),
        (lambda root: make_file(root / "rocksdbstore/000009.sst", bytes(1 << 20) + b"nametimer" + bytes(2000)),
         "timerRocksDBEnable"),
        (lambda root: (root / "consumequeue/%RETRY%g+t/0").mkdir(parents=True), "enableRetryTopicV2"),
        (lambda root: (root / "consumequeue/RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC/0").mkdir(parents=True),
         "transRocksDBEnable"),
    ],
)  # fmt: skip
def test_traces_of_state_elsewhere_are_refused(tmp_path: Path, make: Callable[[Path], None], option: str) -> None:
    make(tmp_path)
    io, paths, lines = StoreIO(), StorePaths(tmp_path), list[str]()
    assert [each.feature.option for each in find_unsupported(io, paths)] == [option]
    with pytest.raises(StartError, match=option):
        refuse_unsupported(io, paths, lines.append, ignore=False)
    assert not lines
    refuse_unsupported(io, paths, lines.append, ignore=True)
    assert [option in line for line in lines] == [True]


@pytest.mark.parametrize(
    ("folder", "option"),
    [("dledger-n0", "enableDLegerCommitLog"), ("consumequeue_rocksdb", "storeType"), ("config/rdb", "configManager")],
)
def test_data_elsewhere_is_refused_also_with_ignore(tmp_path: Path, folder: str, option: str) -> None:
    Rig(tmp_path).dispatch(3)
    for path in (tmp_path / "consumequeue").iterdir() if folder == "consumequeue_rocksdb" else ():
        path.rename(tmp_path / "gone")
    make_file(tmp_path / folder / "CURRENT", b"MANIFEST-000005")
    make_file(tmp_path / folder / "000011.sst")
    before = contents(tmp_path)
    with pytest.raises(StartError, match=option):
        run_recovery(StoreIO(), StorePaths(tmp_path), Options(ignore_kvstore=True))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("release", ["", "5.5.0"])
def test_ordinary_stores_have_no_unsupported_part(tmp_path: Path, release: str) -> None:
    """RocketMQ 5.5 makes an empty rocksdbstore in each store, and may make an empty kvStore."""
    for path in sorted((GOLDEN / release).glob("*.tar.gz")):
        name = path.name.removesuffix(".tar.gz")
        if name in STORES:
            continue
        with tarfile.open(path) as archive:
            folders = {member.split("/")[0] for member in archive.getnames()}
        load_store(name, tmp_path / name, GOLDEN / release)
        for folder in folders:
            assert not find_unsupported(StoreIO(), StorePaths(tmp_path / name / folder)), (name, folder)
    make_file(tmp_path / "kvStore/000004.log", b"")
    make_file(tmp_path / "kvStore/CURRENT")
    make_file(tmp_path / "rocksdbstore/000013.sst", b"namedefault")
    assert not find_unsupported(StoreIO(), StorePaths(tmp_path))
