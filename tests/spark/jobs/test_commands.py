"""`mqproc spark …` commands: output formats, exit codes, one-line errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from mqproc.cli.spark import session as spark_session
from tests.golden.fixtures import load_fixture
from tests.spark.support import messages_of
from tests.support.command_line import call
from tests.support.store_builders import FIRST_MS, write_at

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.usefixtures("spark"),
]


def test_counts_as_rows_and_plot(rolled_store: Path, tmp_path: Path) -> None:
    found = call(
        *("spark", "counts", rolled_store, "--by", "topic", "--window", "300ms", "--topic", "First", "--json"),
        *("--no-latencies", "--begin", FIRST_MS, "--end", FIRST_MS + 300),
    )
    assert found.code == 0, found.err
    stored = [each for each in messages_of(rolled_store, topic="First") if each.store_timestamp_ms < FIRST_MS + 300]
    rows = found.json["counts"]
    assert sum(row["messages"] for row in rows) == len(stored)
    assert all(row["window_end_ms"] - row["window_start_ms"] == 300 for row in rows)
    drawn = call("spark", "counts", rolled_store, "--window", "300ms", "--plot", tmp_path / "out.svg")
    assert drawn.code == 0, drawn.err
    assert "<svg" in (tmp_path / "out.svg").read_text()
    once = call("spark", "counts", rolled_store, "--by", "topic", "--by", "topic", "--no-latencies", "--json")
    assert [sorted(row) for row in once.json["counts"]] == [["bytes", "messages", "topic"]] * 3
    none = call("spark", "counts", rolled_store, "--topic", "Frist", "--json")
    assert (none.code, none.json["counts"]) == (0, []), none.err
    assert f"no selected messages in {rolled_store}" in none.err
    assert call("spark", "counts", rolled_store, "--to", tmp_path / "out").code == 0
    assert sum(ds.dataset(tmp_path / "out").to_table().column("messages").to_pylist()) == 640


def test_invalid_arguments_rejected_before_spark_starts(
    rolled_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_session, "SignalExit", None)
    for arguments, says in (
        (("--window", "0s"), "window = 0 s"),
        (("--window", "1h", "--slide", "2h"), "no longer than the window"),
        (("--window", "10m", "--slide", "1ms"), "in 600,000 windows; the limit is 1,500"),
        (("--slide", "1h"), "--slide needs a --window"),
        (("--plot", tmp_path / "out.bmp"), "a plot is one of"),
        (("--plot", tmp_path / "missing" / "out.svg"), "no such folder"),
        (("--plot", tmp_path / "out.svg", "--to", tmp_path / "out"), "--plot and --to: choose one"),
        (("--plot", tmp_path / "out.svg", "--json"), "--plot and --output json: choose one"),
        (("--to", tmp_path), f"{tmp_path}: already exists; counts are written to a new folder"),
        (("--store", tmp_path), "name stores either as arguments or by --store"),
    ):
        refused = call("spark", "counts", rolled_store, *arguments)
        assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
        assert says in refused.err
    assert call("spark", "lag", rolled_store, "--window", "0s").code == 2


def test_verify_damage_exits_with_1(rolled_store: Path, tmp_path: Path) -> None:
    store = shutil.copytree(rolled_store, tmp_path / "store")
    write_at(store / "consumequeue" / "First" / "1" / f"{0:020d}", 20 * 3, b"\0\1")
    found = call("spark", "verify", store)
    assert found.code == 1, found.err
    assert "unit_wrong" in found.out


def test_lag_of_rocketmq_groups(tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    topic = max(path.name for path in (store / "consumequeue").iterdir())
    table = {f"{topic}@Readers": {"0": 0}}
    (store / "config").mkdir(exist_ok=True)
    (store / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": table}))
    (row,) = call("spark", "lag", store, "--json").json["lag"]
    stored = messages_of(store, topic=topic, queue_id=0)
    assert (row["group"], row["behind"]) == ("Readers", len(stored))
    assert row["oldest_stored_ms"] == (stored[0].store_timestamp_ms if stored else None)
    assert call("spark", "lag", store, "--to", tmp_path / "history").code == 0
    assert ds.dataset(tmp_path / "history").to_table(columns=["behind"]).to_pylist() == [{"behind": len(stored)}]
    (store / "config" / "consumerOffset.json").unlink()
    for options, says in (
        ((), "no group has committed offsets"),
        (("--window", "1d"), "no group has unconsumed"),
    ):
        none = call("spark", "lag", store, *options)
        assert none.code == 0, none.err
        assert says in none.err


def test_rebuild_reports_units_and_rejects_existing_target(rolled_store: Path, tmp_path: Path) -> None:
    built = call("spark", "rebuild", rolled_store, "--to", tmp_path / "to", "--json")
    assert built.code == 0, built.err
    assert sum(row["units"] for row in built.json["queues"]) == 640
    assert "640 units of 12 queues" in built.err
    again = call("spark", "rebuild", rolled_store, "--to", tmp_path / "to")
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "not empty" in again.err


def test_export_and_compact_write_files(rolled_store: Path, tmp_path: Path) -> None:
    done = call("spark", "export", rolled_store, "--to", tmp_path / "out", "--topic", "Third", "--json")
    assert done.json["messages"] == len(messages_of(rolled_store, topic="Third"))
    done = call("spark", "compact", rolled_store, "--to", tmp_path / "last", "--column", "topic", "--json")
    assert done.json["keys"] == 640


def test_export_into_store_or_from_missing_store_writes_nothing(rolled_store: Path, tmp_path: Path) -> None:
    store = shutil.copytree(rolled_store, tmp_path / "stores" / "store")
    written = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    for command, to, mode in (
        *(("export", to, "overwrite") for to in (store, store.parent, f"file://{store}")),
        *(("compact", to, "overwrite") for to in (store, store.parent)),
        ("export", store / "commitlog", "append"),
    ):
        refused = call("spark", command, store, "--to", to, "--mode", mode)
        assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
    for command in ("counts", "duplicates", "lag", "verify", "rebuild"):
        refused = call("spark", command, store, "--to", store / "new")
        assert (refused.code, refused.err.count("\n")) == (2, 1), refused.err
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == written
    previous = tmp_path / "out" / "previous"
    previous.parent.mkdir()
    previous.touch()
    for command, mode in (("export", "overwrite"), ("compact", "overwrite"), ("export", "append")):
        missing = call("spark", command, tmp_path / "s_typo", "--to", previous.parent, "--mode", mode)
        assert (missing.code, previous.exists()) == (5, True), missing.err
    for command in ("export", "compact", "counts", "duplicates", "lag"):
        assert call("spark", command, tmp_path / "s_typo", "--to", tmp_path / "new").code == 5
        assert not (tmp_path / "new").exists()


def test_errors_are_one_line(rolled_store: Path, tmp_path: Path) -> None:
    missing = call("spark", "counts", tmp_path / "missing")
    assert missing.code == 5
    assert missing.err.count("\n") == 1
    assert "no such folder" in missing.err
    store = shutil.copytree(rolled_store, tmp_path / "store")
    lost = messages_of(store)[100]
    write_at(store / "commitlog" / f"{0:020d}", lost.physical_offset + 120, b"\xff")
    damaged = call("spark", "export", store, "--to", tmp_path / "out")
    assert damaged.code == 6, damaged.err
    assert damaged.err.count("\n") == 1
    assert "no intact record in bytes" in damaged.err
    failed = call("spark", "export", rolled_store, "--to", "foo://bar/baz")
    assert (failed.code, failed.err) == (1, 'mqproc: Spark: No FileSystem for scheme "foo"\n')
    zone = call("spark", "counts", rolled_store, "--conf", "spark.sql.session.timeZone=Mars/X")
    assert (zone.code, zone.err.count("\n")) == (3, 1), zone.err
    assert "Mars/X" in zone.err
    master = call("spark", "counts", rolled_store, "--master", "bogus")
    assert (master.code, master.err.count("\n")) == (2, 1), master.err
    assert call("spark", "counts", rolled_store, "--conf", "nothing").code == 2
    assert call("spark", "replay", rolled_store, "--to", "Again").code == 2


def test_script_path_for_spark_submit() -> None:
    assert Path(call("spark", "script").out.strip()).is_file()
