"""Benchmarks: fresh bodies, measured figures, and every command end to end."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqproc import Client, Message
from mqproc.bench import limits, runs, stores
from mqproc.bench.clients import KEY_CHARACTERS, Messages, Recorder, Shape, key_of, paced
from mqproc.bench.commands import print_result
from mqproc.bench.runs import BenchGroup, figures_of
from mqproc.cli.output import Output
from mqproc.client.retry import NO_RETRY
from mqproc.errors import DiskFullError, NotRunningError, RequestTimeoutError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.layout.control import DISK_FULL
from tests.support.command_line import call
from tests.support.group import Group, wait_until

SHAPE = Shape(size=64, batch=100, topics=1, queues=1, keys=1, in_flight=1)


def test_bodies_and_keys_differ_by_frame_and_producer() -> None:
    bodies: set[bytes] = set()
    keys: set[str] = set()
    for producer in (0, 1):
        messages = Messages(SHAPE, producer)
        for _ in range(20):
            rows = messages.bodies(100)
            column = messages.keys(100)
            messages.advance(100)
            assert rows.shape == (100, 64)
            bodies |= {row.tobytes() for row in rows}
            keys |= set(column.to_pylist() if hasattr(column, "to_pylist") else column)
    assert len(bodies) == len(keys) == 4000
    assert {len(key) for key in keys} == {KEY_CHARACTERS}


def test_body_bytes_after_the_number_are_fresh() -> None:
    messages = Messages(SHAPE, 0)
    tails = {messages.bodies(1).tobytes()[8:] for _ in range(1000)}
    assert len(tails) == 1000


def test_bodies_beyond_one_frame_are_fresh() -> None:
    """Batches of single messages are built together; bodies above 2 KiB ended the benchmark."""
    messages = Messages(replace(SHAPE, size=4096, batch=1), 0)
    for _ in range(2):
        rows = messages.bodies(300)
        messages.advance(300)
        assert rows.shape == (300, 4096)
        assert len({row[8:].tobytes() for row in rows}) == 300


@pytest.mark.parametrize("sent", [0, 65_530, 1 << 40])
def test_keys_are_message_numbers(sent: int) -> None:
    messages = Messages(SHAPE, 3)
    messages.advance(sent)
    column = messages.keys(100)
    found = column.to_pylist() if hasattr(column, "to_pylist") else column
    assert found == [key_of(messages.number + index) for index in range(100)]


@pytest.mark.parametrize("size", [0, 1, 5, 8, 12, 64])
def test_body_begins_with_its_number(size: int) -> None:
    messages = Messages(Shape(size, 100, 1, 1, 1, 1), 0)
    messages.advance(77)
    width = min(8, size)
    assert [row[:width].tobytes() for row in messages.bodies(100)] == [
        number.to_bytes(8, "little")[:width] for number in range(77, 177)
    ]


@pytest.mark.parametrize("keys", [0, 3])
def test_zero_or_several_keys(keys: int) -> None:
    column = Messages(Shape(64, 10, 1, 1, keys, 1), 0).keys(10)
    assert column is None if keys == 0 else [len(set(several)) for several in column] == [3] * 10


def test_figures_count_requests_within_the_measured_time() -> None:
    rows = np.array([[50, 5, 1], [100, 1000, 10], [150, 2000, 10], [200, 3000, 10], [250, 9, 1]], np.int64)
    found = figures_of(rows, 99, 200, 64)
    assert (found.messages, found.size, found.requests) == (30, 1920, 3)
    assert (found.mean_us, found.max_us) == (2.0, 3.0)
    assert found.percentiles_us[0] == 2.0
    assert "30 records sent" in found.line("sent")


def test_figures_without_requests_are_zero() -> None:
    assert figures_of(np.empty((0, 3), np.int64), 0, 10**9, 64).per_second == 0


def test_pacing_keeps_the_rate_and_stops() -> None:
    counters = np.zeros(Recorder.WORDS, np.int64)
    recorder = Recorder(counters)
    started = time.monotonic()
    for turn, _ in enumerate(paced(200, recorder)):
        if turn == 20:
            counters[Recorder.STATE] = Recorder.STOP
    assert time.monotonic() - started >= 0.095


def test_machine_limits_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("MEMORY_BYTES", 1 << 20),
        ("DISK_BYTES", 1 << 20),
        ("PAGE_CACHE_BYTES", 1 << 20),
        ("ECHOES", 40),
        ("SYNCS", 5),
    ):
        monkeypatch.setattr(limits, name, value)
    found = limits.measure_limits(tmp_path)
    assert all(value > 0 for value in found.values())
    assert list(tmp_path.iterdir()) == []


SMALL = (
    "--no-limits",
    "--seconds",
    "1",
    "--warmup",
    "0.1",
    "--json",
    "--set",
    "mapped_file_size_commit_log=67108864",
)
ROUNDS_MAX = 5


def measured(enough: Callable[[Any], bool], *arguments: str | int) -> Any:
    """Output of a benchmark whose round lasted its full second, after at most a few attempts."""
    rounds = [call("bench", *arguments, *SMALL).json]
    while not enough(rounds[-1]):
        assert len(rounds) < ROUNDS_MAX, rounds
        rounds.append(call("bench", *arguments, *SMALL).json)
    return rounds[-1]


def test_append_pinned_separates_writer_and_clients() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
    found = measured(lambda found: found["append"]["messages"] > 0, "append", "--pin", "--batch", 50)
    assert found["parameters"]["pin"] is True


def test_pinning_with_store_is_refused(tmp_path: Path) -> None:
    refused = call("bench", "append", "--pin", "--store", tmp_path, *SMALL)
    assert refused.code == 2
    assert "it needs its own group, without --store" in refused.err


def refused_for_the_disk(group: Group, client: Client) -> bool:
    """Report a refused message after `word`; the keeper checks again and finds free space."""
    control = Control.open(StoreIO(), group.paths, write=True)
    with closing(control):
        control.store(DISK_FULL, 1)
    try:
        client.send("orders", b"x")
    except DiskFullError:
        return True
    return False


def test_disk_full_refusals_are_noted(make_group: Callable[..., Group]) -> None:
    group = make_group()
    reported = Output(stream=io.StringIO(), errors=io.StringIO())
    with closing(BenchGroup(group.store)) as bench, Client(group.store, retry=NO_RETRY) as client:
        before = bench.refusals()
        wait_until(lambda: refused_for_the_disk(group, client), what="a refusal")
        refused = dict(bench.refusals() - before)
    assert refused == {"DISK_FULL": 1}
    print_result(reported, {"append": {"refusals": refused}}, {})
    assert "The disk was nearly full: 1 frames were refused" in reported.errors.getvalue()
    print_result(reported, {"append": {"refusals": {}}}, {})
    assert reported.errors.getvalue().count("nearly full") == 1


def test_append_and_e2e_run_end_to_end() -> None:
    def enough(found: Any) -> bool:
        return min(found["append"]["messages"], found["to_waiting_consumer"]["delivered"]["messages"]) > 0

    found = measured(enough, "e2e", "--batch", 50, "--topics", 2)
    assert found["append"]["errors"] == 0
    assert found["append"]["cpu_us_per_message"]["writer"] >= 0
    assert not Path(found["store"]).exists()


@pytest.mark.parametrize("shape", [("--batch", 50, "--in-flight", 4), ("--batch", 1, "--in-flight", 100)])
def test_append_with_rate_reads_answers_in_pauses(shape: tuple[str | int, ...]) -> None:
    # Frames come 50 or 250 ms apart; the client must not wait for three more before it reads an answer.
    measured(
        lambda found: found["append"]["messages"] > 0 and found["append"]["latency_us_p50"] < 50_000,
        *("append", "--rate", 200, *shape),
    )


@pytest.mark.parametrize("kind", [("--ahead", "200ms"), ("--level", 1)])
def test_delay_is_never_early_and_hardly_late(kind: tuple[str, str | int]) -> None:
    found = measured(lambda found: found["delay"]["due"] > 0, "delay", "--rate", 500, *kind)["delay"]
    assert (found["early"], found["errors"]) == (0, 0)
    assert 0 <= found["stored_late_ms"]["p50"] <= found["seen_late_ms"]["max"]


def test_dispatch_catches_up() -> None:
    found = call("bench", "dispatch", "--messages", 20_000, *SMALL).json
    assert found["dispatch"]["messages"] == 20_000
    assert found["dispatch"]["index_entries"] == 40_000


def test_pull_and_query_find_loaded_messages() -> None:
    pytest.importorskip("pyarrow")

    def enough(found: Any) -> bool:
        pulled = found["pull"]
        return pulled["arrow"]["messages"] > 5000 and pulled["objects"]["messages"] > 0

    measured(enough, "pull", "--messages", 5000)
    asked = call("bench", "query", "--messages", 5000, "--topics", 2, *SMALL).json["query"]
    assert {name: values["without_answer"] for name, values in asked.items()} == dict.fromkeys(asked, 0)


def test_filter_reads_loaded_messages() -> None:
    def enough(found: Any) -> bool:
        return min(figures["messages"] for figures in found["filter"].values()) > 5000

    found = measured(enough, "filter", "--messages", 20_000)["filter"]
    assert set(found) == {"tag", "sql"}
    assert [figures["errors"] for figures in found.values()] == [0, 0]


def test_consume_reads_loaded_messages() -> None:
    def enough(found: Any) -> bool:
        return min(found["consume"][kind]["messages"] for kind in ("objects", "tag")) > 0

    kinds = ("--as", "objects", "--as", "tag")
    found = measured(enough, "consume", "--messages", 20_000, *kinds, "--idle", 3)["consume"]
    assert found["idle"]["consumers"] == 3


def test_dispatch_with_store_is_refused(tmp_path: Path) -> None:
    assert call("bench", "dispatch", "--store", tmp_path).code == 2


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (limits, "MEMORY_BYTES", 1 << 20),
        (limits, "DISK_BYTES", 1 << 20),
        (stores, "KERNEL_BYTES", 1 << 20),
        (stores, "_PART_MESSAGES", 5000),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize(
    ("command", "ways"),
    [
        ("recovery", ["after a clean stop", "after kill -9"]),
        ("rebuild", ["queues and index removed", "the same, with the log in memory"]),
    ],
)
def test_recovery_and_rebuild_restore_the_store(command: str, ways: list[str], small_limits: None) -> None:
    small = ("--set", "mapped_file_size_commit_log=67108864", "--json")
    found = call("bench", command, "--log-size", "1MiB", "--topics", 2, *small).json
    sizes = {"log_bytes_per_message", "derived_bytes_per_message"}
    assert set(found) == {*ways, *sizes, "machine", "schema_version"}
    for way in ways:
        assert found[way]["messages"] == 5000
        assert 0 < found[way]["recovery_seconds"] < found[way]["start_seconds"]
        assert [line for line in found[way]["steps"] if "recovery: log:" in line]
    assert all(rate > 0 for rate in found["machine"].values())
    for way in ways if command == "rebuild" else ():
        (line,) = [line for line in found[way]["steps"] if "recovery: dispatch:" in line]
        assert "5,000 records and 10,000 index entries from 0" in line


def test_wait_for_dispatch_ends_with_the_group(make_group: Callable[..., Group]) -> None:
    group = make_group()
    os.kill(group.pid("dispatcher"), signal.SIGSTOP)
    with group.client() as client, closing(BenchGroup(group.store)) as bench:
        client.send(Message("orders", b"hello"))
        with pytest.raises(RequestTimeoutError, match="lags by"):
            bench.await_dispatch(0.01)
        group.kill()
        with pytest.raises(NotRunningError, match="the group ended"):
            bench.await_dispatch()


def test_frames_too_large_are_refused_before_the_start() -> None:
    """The clients built them for a minute, with any amount of memory, until the start timed out."""
    for command in (["append"], ["e2e"], ["e2e", "--part", "throughput"], ["delay", "--batch", 1000]):
        assert call("bench", *command, "--size", "5MiB").code == 2
    refused = call("bench", "append", "--size", "5MiB")
    assert "--size 5,242,880 and --batch 1,000 make frames of 5,242,880,000 bytes; a client's limit" in refused.err


@pytest.mark.parametrize(
    "command", [["pull"], ["consume"], ["filter"], ["query"], ["dispatch"], ["e2e", "--part", "latency"]]
)
def test_pull_batch_size_is_independent_of_frames(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages to read are loaded in frames of another length: --batch is the size of a pull."""

    def begin(*_: object) -> None:
        raise DiskFullError("begun")

    monkeypatch.setattr(runs, "bench_group", begin)
    assert call("bench", *command, "--size", "128KiB").err == "mqproc: begun\n"
