"""Dumping a log: holes of every kind, published records only, constant memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc import Message
from mqproc.paths import StorePaths
from mqproc.util.units import GIB, MIB
from tests.golden.fixtures import GOLDEN, directories, load_fixture
from tests.support.command_line import call
from tests.support.group import Group

BY_NAME = {str(each): each for each in directories(GOLDEN)}
# Python, numpy and compiled kernels take about 150 MiB.
MEMORY_MAX = 400 * MIB
PEAK = """
import sys
from mqproc.cli.main import main
code = main(sys.argv[1:])
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(code, int(status["VmHWM"].split()[0]) << 10)
"""


def test_dump_missing_segment_is_a_hole(tmp_path: Path) -> None:
    directory = BY_NAME["d14_middle_file_gone_clean/clean"]
    store = directory.unpack(tmp_path)
    outcome = call("store", "dump", store, "--json")
    assert outcome.code == 1
    assert outcome.err == f"{store / 'commitlog'}: hole [131072, 196608), 64.0 KiB: missing segment\n"
    whole = [each["phyOffset"] for each in directory.undamaged["records"] if not 131072 <= each["phyOffset"] < 196608]
    assert [row["physical_offset"] for row in outcome.json_lines] == whole
    assert call("store", "dump", store / "commitlog", "--json") == outcome
    assert call("store", "dump", "--store", store, "--json") == outcome
    assert call("store", "dump").code == 2


def test_dump_short_segment_is_a_hole(tmp_path: Path) -> None:
    store = load_fixture("a_basic", tmp_path).store
    segment = store / "commitlog" / f"{65536:020d}"
    end = call("store", "dump", segment, "--json").json["layout"][0]["size"]
    with segment.open("r+b") as file:
        file.truncate(end)
    outcome = call("store", "dump", store, "--json")
    assert outcome.code == 1
    assert f"hole [{65536 + end}, 131072)" in outcome.err
    assert "short segment" in outcome.err


def test_dump_running_store_reads_published_records(make_group: Callable[..., Group]) -> None:
    """Written but unpublished bytes are neither records nor damage."""
    group = make_group(mapped_file_size_commit_log=65536)
    with group.client() as client:
        sent = client.send(Message("orders", b"x" * 100))
        client.wait_dispatched()
        paths = StorePaths(group.store)
        segment = paths.commit_log / f"{0:020d}"
        record = call("store", "dump", segment, "--json").json["rows"][0]
        assert record["physical_offset"] == sent.physical_offset
        with segment.open("r+b") as file:
            file.seek(record["size"])
            file.write(b"\0\0\1\0\xda\xa3\x20\xa7")
        for path in (group.store, segment):
            outcome = call("store", "dump", path, "--json")
            assert (outcome.code, outcome.err) == (0, "")
        layout = call("store", "dump", segment, "--json").json["layout"]
        assert [each["name"] for each in layout] == ["records", "unwritten"]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A segment of 1 GiB: a few records, 700 MiB never written, garbage, and the rest."""
    golden = load_fixture("a_basic", tmp_path_factory.mktemp("golden")).store / "commitlog" / f"{0:020d}"
    end = call("store", "dump", golden, "--json").json["layout"][0]["size"]
    segment = tmp_path_factory.mktemp("sparse") / "commitlog" / f"{0:020d}"
    segment.parent.mkdir()
    with segment.open("wb") as file:
        file.write(golden.read_bytes()[:end])
        file.seek(700 * MIB)
        file.write(b"torn")
        file.truncate(GIB)
    return segment.parent.parent


@pytest.mark.parametrize(
    "arguments",
    [
        ("dump", "commitlog/00000000000000000000", "--max", "1"),
        ("dump", "."),
        ("export", ".", "--topic", "OrderTopic", "--to", "out.jsonl"),
    ],
    ids=["dump of the file", "dump of the store", "export"],
)
def test_dump_sparse_segment_takes_little_memory(sparse: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    called = [str(tmp_path / each) if each == "out.jsonl" else each for each in arguments]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "store", *called],
        cwd=sparse,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    code, peak = done.stdout.splitlines()[-1].split()
    assert int(code) == 1
    assert f"{700 * MIB + 4}" in done.stderr or "damage" in done.stdout
    assert int(peak) < MEMORY_MAX
