"""topic, send, tail and message against a real group."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc.cli.message.format import to_json, to_row
from mqproc.client import Client
from mqproc.types import Message
from mqproc.util.units import counted
from tests.support.command_line import Outcome, call
from tests.support.group import PATIENCE_S, SMALL, Group, wait_until

TOPIC = "orders"
COUNT = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A group with 40 messages: key order-N, tag even or odd, four queues in turn."""
    group = Group(tmp_path_factory.mktemp("group") / "store").start()
    try:
        with group.client() as client:
            client.create_topic(TOPIC, 4)
            for number in range(COUNT):
                tag = "even" if number % 2 == 0 else "odd"
                message = Message(
                    TOPIC, f'{{"n":{number}}}'.encode(), tag, (f"order-{number}",), {"color": f"c{number % 3}"}
                )
                client.send(message)
        group.wait_dispatched()
        yield group.store
    finally:
        group.close()


def ask(store: Path, *arguments: str | int, stdin: bytes = b"") -> Outcome:
    return call(*arguments, "--store", store, stdin=stdin)


# topic


def test_topic_create_list_info_delete(store: Path) -> None:
    assert ask(store, "topic", "create", "short-lived", "--queues", 3).code == 0
    listed = {row["topic"]: row for row in ask(store, "topic", "list", "--json").json["topics"]}
    assert ask(store, "topic", "create", "single", "--queues", 1).err == "topic single has 1 queue\n"
    assert (listed["short-lived"]["queues"], listed["short-lived"]["permissions"]) == (3, "rw")
    assert listed[TOPIC]["message_count"] >= COUNT
    info = ask(store, "topic", "info", "short-lived", "--json").json
    assert [queue["queue_id"] for queue in info["queue_offsets"]] == [0, 1, 2]
    plan = ask(store, "topic", "delete", "short-lived")
    assert plan.code == 0
    assert ask(store, "topic", "delete", "short-lived", "--detailed-exitcode").code == 2
    assert "--execute does it" in plan.err
    assert ask(store, "topic", "delete", "short-lived", "--yes").code == 0
    assert ask(store, "topic", "info", "short-lived").code == 5


def test_topic_create_with_fewer_queues_is_refused(store: Path) -> None:
    outcome = ask(store, "topic", "create", TOPIC, "--queues", 2)
    assert outcome.code == 1
    assert outcome.err.startswith("mqproc: ")


def test_topic_delete_system_topic_is_refused(store: Path) -> None:
    assert ask(store, "send", "later", "x", "--delay-level", 18).code == 0
    for more in ((), ("--yes",)):
        outcome = ask(store, "topic", "delete", "SCHEDULE_TOPIC_XXXX", *more)
        assert outcome.code == 2
        assert "the system's own" in outcome.err


# send


def test_send_with_all_options(store: Path) -> None:
    options = ("--key", "a", "--key", "b", "--tag", "t", "--property", "x=y", "--queue", 2)
    sent = ask(store, "send", "one", "hello", *options, "--json").json
    found = ask(store, "message", "get", sent["message_id"], "--json", "--body", "text").json
    assert (found["body"], found["keys"], found["tag"], found["queue_id"]) == ("hello", ["a", "b"], "t", 2)
    assert found["properties"]["x"] == "y"
    _settled(store)
    assert ask(store, "message", "get", sent["unique_id"], "--topic", "one").code == 0
    by_id = ask(store, "message", "id", sent["message_id"], "--json", "--body", "text")
    assert (by_id.code, by_id.json) == (0, found)


def test_send_lines_of_stdin(store: Path, tmp_path: Path) -> None:
    assert ask(store, "send", "lines", stdin=b"k1:first\nsecond\r\n\n").code == 0
    file = tmp_path / "lines"
    file.write_bytes(b"k1:third\nk2:fourth\n")
    outcome = ask(store, "send", "lines", "--file", str(file), "--key-delimiter", ":", "--output", "jsonl")
    assert [row["queue_offset"] >= 0 for row in outcome.json_lines] == [True, True]
    _settled(store)
    assert [row["keys"] for row in ask(store, "message", "key", "lines", "k2", "--json").json["messages"]] == [["k2"]]
    bodies = ask(store, "tail", "lines", "--from", "beginning", "--format", "%s|").out
    assert sorted(bodies.split("|")) == sorted(["k1:first", "second", "", "third", "fourth", ""])


def test_send_csv_output_has_one_header(store: Path) -> None:
    for lines in (b"a\n", b"a\nb\nc\n"):
        outcome = ask(store, "send", "as-csv", "--output", "csv", stdin=lines)
        rows = list(csv.DictReader(outcome.out.splitlines()))
        assert [row["status"] for row in rows] == ["PUT_OK"] * lines.count(b"\n")
        assert all(len(row["message_id"]) == 32 and row["queue_offset"].isdigit() for row in rows)


def test_send_invalid_line_is_reported_others_are_sent(store: Path) -> None:
    large = b"x" * (SMALL["max_message_size"] + 1)
    lines = b"\n".join([b"k1:v", b":w", b"k3:x", b"\xff:y", b"k5:" + large, b"k6:z"])
    outcome = ask(store, "send", "bad-lines", "--key-delimiter", ":", stdin=lines)
    assert outcome.code == 1
    told = sorted(outcome.err.splitlines())
    assert told[0].startswith("3 messages stored in ")
    assert told[1] == "mqproc: line 2 was not stored: BAD_PROPERTY: key '' is empty or no text"
    assert told[2] == "mqproc: line 4 was not stored: BAD_PROPERTY: key b'\\xff' is not UTF-8"
    assert told[3].startswith(f"mqproc: line 5 was not stored: MESSAGE_TOO_LARGE: body of {len(large):,} bytes; ")
    assert told[4:] == ["not stored: 3 messages"]
    _settled(store)
    assert ask(store, "tail", "bad-lines", "--format", "%k=%s ").out == "k1=v k3=x k6=z "


def test_send_lines_with_wrong_options_is_a_usage_error(store: Path) -> None:
    outcome = ask(store, "send", "lines", "--key", "a b", stdin=b"1\n2\n")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)


def test_send_interrupted_reports_the_count(store: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MQPROC_")}
    command = [sys.executable, "-m", "mqproc", "send", "endless", "x", "--count", "1000000", "--rate", "100"]
    with subprocess.Popen(
        [*command, "--store", str(store), "--output", "raw"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as child:  # fmt: skip
        wait_until(lambda: ask(store, "topic", "info", "endless").code == 0, what="the first message")
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    stored = out.count("\n")
    assert stored > 0
    assert err.startswith(f"{counted(stored, 'message')} stored in ")


@pytest.mark.parametrize("rate", ["nan", "inf", "0", "-1"])
def test_send_invalid_rate_is_a_usage_error(store: Path, rate: str) -> None:
    assert ask(store, "send", "lines", "x", "--rate", rate).code == 2
    assert ask(store, "replay", "--topic", "lines", "--to", "again", "--rate", rate if rate != "0" else "nan").code == 2


def test_message_range_count_takes_no_limit(store: Path) -> None:
    outcome = ask(store, "message", "range", TOPIC, "--count", "--max", 2)
    assert (outcome.code, outcome.out) == (2, "")


def test_send_output_escapes_unencodable_characters(store: Path) -> None:
    body = "caf\u00e9 \U0001f600"
    assert ask(store, "send", "characters", body).code == 0
    _settled(store)
    command = [sys.executable, "-m", "mqproc", "tail", "characters", "--store", str(store)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    plain = subprocess.run([*command, "--format", "%s"], capture_output=True, env=environment, check=True)
    assert plain.stdout == b"caf\\u00e9 \\ud83d\\ude00"
    as_json = subprocess.run([*command, "--json", "--body", "text"], capture_output=True, env=environment, check=True)
    assert json.loads(as_json.stdout)["body"] == body


def test_send_closed_stdin_is_a_usage_error(store: Path) -> None:
    command = f'exec "{sys.executable}" -m mqproc send lines - --store "{store}" <&-'
    outcome = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("mqproc: stdin is closed: give BODY or --file")


def test_send_count_and_rate(store: Path) -> None:
    started = time.monotonic()
    outcome = ask(store, "send", "paced", "x", "--count", 5, "--rate", 50)
    assert outcome.code == 0
    assert time.monotonic() - started >= 4 / 50
    assert outcome.err.startswith("5 messages stored")


def test_send_sharding_key_keeps_order_in_one_queue(store: Path) -> None:
    sent = ask(store, "send", "sharded", "--sharding-key", "order-1", "--output", "jsonl", stdin=b"0\n1\n2\n")
    assert sent.code == 0
    rows = sent.json_lines
    assert len({row["queue_id"] for row in rows}) == 1
    assert [row["queue_offset"] for row in rows] == [0, 1, 2]
    whole = ask(store, "message", "get", rows[0]["message_id"], "--json").json
    assert whole["properties"]["__SHARDINGKEY"] == "order-1"
    assert "not both" in ask(store, "send", "sharded", "x", "--sharding-key", "a", "--queue", 1).err


def test_send_delayed_messages_are_delivered(store: Path) -> None:
    """By level, by duration and by time."""
    at = time.time() + 1
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
    for name, value in (("--delay-level", "1"), ("--deliver-at", "300ms"), ("--deliver-at", moment)):
        sent = ask(store, "send", "later", value, name, value, "--json")
        assert sent.code == 0
        assert sent.json["message_id"]
    expected = {"1", "300ms", moment}

    def arrived() -> bool:
        found = ask(
            store, "tail", "later", "--from", "beginning", "--count", 3, "--timeout", "0.2s", "--format", "%s\\n"
        )
        return set(found.out.split()) == expected

    wait_until(arrived, what="three messages")
    assert ask(store, "send", "later", "x", "--delay-level", 19).code == 2
    assert ask(store, "send", "later", "x", "--deliver-at", "never").code == 2


def test_send_invalid_message_is_a_usage_error(store: Path) -> None:
    assert ask(store, "send", "bad topic!", "x").code == 2
    assert ask(store, "send", TOPIC, "x", "--key", "a b").code == 2
    assert ask(store, "send", TOPIC, "x", "--property", "nothing").code == 2


def _settled(store: Path) -> None:
    wait_until(lambda: not ask(store, "stat", "--json").json["words"]["dispatch_behind_bytes"], what="dispatch")


# tail


def numbers(outcome: Outcome) -> list[int]:
    return [int(line) for line in outcome.out.split()]


N_FORMAT = ("--format", "%o\\n")


def test_tail_prints_last_messages_in_log_order(store: Path) -> None:
    rows = ask(store, "tail", TOPIC, "--json").json_lines
    assert [row["keys"] for row in rows] == [[f"order-{number}"] for number in range(COUNT - 10, COUNT)]
    rows = ask(store, "tail", TOPIC, "--from", "-3", "--json").json_lines
    assert [row["keys"][0] for row in rows] == ["order-37", "order-38", "order-39"]


@pytest.mark.parametrize("count", [1, 3, 20, COUNT, COUNT + 1])
def test_tail_count_prints_the_last_messages(store: Path, count: int) -> None:
    rows = ask(store, "tail", TOPIC, "-n", count, "--json").json_lines
    assert [row["keys"][0] for row in rows] == [f"order-{number}" for number in range(COUNT)][-count:]
    rows = ask(store, "tail", TOPIC, "-n", count, "--tag", "odd", "--json").json_lines
    assert [row["keys"][0] for row in rows] == [f"order-{number}" for number in range(1, COUNT, 2)][-count:]


@pytest.mark.parametrize("count", [1, 5, 15, COUNT])
def test_tail_count_equals_a_negative_start(store: Path, count: int) -> None:
    """The filter or the end may exclude some of the last messages of a queue."""
    for more in (("--tag", "odd"), ("--sql", "color = 'c1'"), ("--until", 6), ("--tag", "odd", "--until", 6)):
        wanted = ask(store, "tail", TOPIC, "-n", count, *more, "--format", "%k\\n").out
        assert wanted
        assert ask(store, "tail", TOPIC, "--from", f"-{count}", *more, "--format", "%k\\n").out == wanted


def test_tail_count_with_until(store: Path) -> None:
    assert numbers(ask(store, "tail", TOPIC, "--queue", 1, "-n", 2, "--until", 6, *N_FORMAT)) == [4, 5]
    assert numbers(ask(store, "tail", TOPIC, "--queue", 1, "-n", 2, "--until", "beginning", *N_FORMAT)) == []


def test_tail_count_with_filter(store: Path) -> None:
    with Client(store) as client:
        client.create_topic("rare", 1)
        client.send_batch("rare", [b"%d" % number for number in range(2000)], tags=["rare"] * 3 + [""] * 1997)
        client.wait_dispatched()
    assert ask(store, "tail", "rare", "--tag", "rare", "-n", 2, "--format", "%s ").out == "1 2 "


def test_tail_from_and_until(store: Path) -> None:
    everything = ask(store, "tail", TOPIC, "--from", "beginning", "--json").json_lines
    assert [row["keys"][0] for row in everything] == [f"order-{number}" for number in range(COUNT)]
    assert numbers(ask(store, "tail", TOPIC, "--queue", 1, "--from", 3, "--until", 6, *N_FORMAT)) == [3, 4, 5]
    assert len(ask(store, "tail", TOPIC, "--from", "1h", "--json").json_lines) == COUNT
    assert ask(store, "tail", TOPIC, "--from", "end").out == ""
    middle = everything[20]["store_timestamp_ms"]
    later = ask(store, "tail", TOPIC, "--from", str(middle), "--json").json_lines
    assert [row["physical_offset"] for row in later] == [
        row["physical_offset"] for row in everything if row["store_timestamp_ms"] >= middle
    ]


def test_tail_group_starts_at_committed_offsets(store: Path) -> None:
    stands = {0: 4, 1: 10, 2: 0}
    with Client(store) as client:
        for queue_id, offset in stands.items():
            client.groups.commit("tailed", TOPIC, queue_id, offset)

    def seen(*arguments: object) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for row in ask(store, "tail", TOPIC, *arguments, "--json").json_lines:
            found.setdefault(row["queue_id"], []).append(row["queue_offset"])
        return found

    # Queue 3 has no committed offset and starts at its beginning; queue 1 is finished.
    left = {0: [*range(4, 10)], 2: [*range(10)], 3: [*range(10)]}
    assert seen("--group", "tailed") == seen("--group", "tailed", "--from", "stored") == left
    assert seen("--group", "tailed", "--from", "beginning", "--until", "stored", "--queue", 0) == {0: [*range(4)]}
    with Client(store) as client:
        progress = {queue.queue_id: queue.offset for queue in client.groups.info("tailed").queues}
    assert progress == stands | {3: None}
    assert "--group" in ask(store, "tail", TOPIC, "--from", "stored").err
    assert ask(store, "tail", TOPIC, "--group", "unknown").code == 5


def test_tail_sql_filter(store: Path) -> None:
    wanted = "color = 'c1' AND TAGS = 'odd'"
    expected = [number for number in range(COUNT) if number % 3 == 1 and number % 2]
    rows = ask(store, "tail", TOPIC, "--from", "beginning", "--sql", wanted, "--json").json_lines
    assert [row["keys"] for row in rows] == [[f"order-{number}"] for number in expected]
    assert ask(store, "message", "range", TOPIC, "--count", "--sql", wanted).out == f"{len(expected)}\n"
    wrong = ask(store, "message", "range", TOPIC, "--sql", "color = ")
    assert (wrong.code, "character 9 (the first is 1): the filter ends" in wrong.err) == (2, True)
    assert ask(store, "tail", TOPIC, "--sql", wanted, "--tag", "odd").code == 2


def test_tail_tag_filter_and_count(store: Path) -> None:
    rows = ask(store, "tail", TOPIC, "--from", "beginning", "--tag", "odd", "-n", 3, "--json").json_lines
    assert [row["keys"][0] for row in rows] == ["order-1", "order-3", "order-5"]


def test_tail_shapes_bodies(store: Path) -> None:
    line = ask(store, "tail", TOPIC, "--from", "beginning", "-n", 1, "--format", "%k=%s\\n", "--body", "hex").out
    assert line == "order-0=7b226e223a307d\n"
    assert ask(store, "tail", TOPIC, "-n", 1, "--format", "%%s %s\\s", "--body", "json").out == '%s {"n":39}\\s'
    assert ask(store, "tail", TOPIC, "--format", "%q").code == 2
    assert ask(store, "tail", "nothing").code == 5
    assert ask(store, "tail", TOPIC, "--queue", 9).code == 2


def test_tail_csv_rows_equal_message_range(store: Path) -> None:
    for shape, body in (("csv", "text"), ("csv", "hex"), ("raw", "text")):
        rows = ask(store, "tail", TOPIC, "--from", "beginning", "--output", shape, "--body", body).out.splitlines()
        expected = ask(store, "message", "range", TOPIC, "--output", shape, "--body", body).out.splitlines()
        assert len(rows) == COUNT + (shape == "csv")
        assert sorted(rows) == sorted(expected)
        assert rows[0] == expected[0]
    header = "queue_id,queue_offset,store_timestamp_ms,tag,keys,body\n"
    assert ask(store, "tail", TOPIC, "--sql", "color = 'none'", "--output", "csv").out == header
    nothing = ask(store, "tail", "nothing", "--output", "csv")
    assert (nothing.code, nothing.out) == (5, "")


def test_tail_follow_prints_new_messages(store: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MQPROC_")}
    ask(store, "topic", "create", "followed", "--queues", 3)
    command = [sys.executable, "-m", "mqproc", "tail", "followed", "-f", "-n", "5", "--format", "%s\\n"]
    with subprocess.Popen([*command, "--store", str(store)], stdout=subprocess.PIPE, env=environment) as child:
        wait_until(lambda: ask(store, "stat", "--json").json["words"]["waiting_pulls"] >= 3)
        for number in range(5):
            assert ask(store, "send", "followed", f"m{number}").code == 0
        out, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0
    # Across queues the order is that of arrival, except for messages that arrive together.
    assert sorted(out.split()) == [f"m{number}".encode() for number in range(5)]


def test_tail_follow_from_a_future_offset(store: Path) -> None:
    ask(store, "topic", "create", "coming", "--queues", 1)
    assert ask(store, "send", "coming", "-", stdin=b"m0\nm1\n").code == 0
    _settled(store)
    command = [sys.executable, "-m", "mqproc", "tail", "coming", "-f", "--format", "%s ", "--store", str(store)]
    with (
        subprocess.Popen([*command, "--from", "3", "-n", "2"], stdout=subprocess.PIPE) as by_offset,
        subprocess.Popen([*command, "--from", "2100-01-01"], stdout=subprocess.PIPE) as by_time,
    ):
        wait_until(lambda: ask(store, "stat", "--json").json["words"]["waiting_pulls"] >= 2)
        assert ask(store, "send", "coming", "-", stdin=b"m2\nm3\nm4\n").code == 0
        assert by_offset.communicate(timeout=PATIENCE_S)[0] == b"m3 m4 "
        # It has passed them once it waits for more.
        wait_until(lambda: ask(store, "stat", "--json").json["words"]["waiting_pulls"] == 1)
        by_time.send_signal(signal.SIGINT)
        assert by_time.communicate(timeout=PATIENCE_S)[0] == b""


# message


def test_message_by_key_offset_and_time(store: Path) -> None:
    (row,) = ask(store, "message", "key", TOPIC, "order-7", "--json").json["messages"]
    assert (row["tag"], row["properties"]["color"]) == ("odd", "c1")
    same = ask(store, "message", "offset", TOPIC, row["queue_id"], row["queue_offset"], "--json").json
    assert same["message_id"] == row["message_id"]
    begin, end = row["store_timestamp_ms"], row["store_timestamp_ms"] + 1
    ranged = ask(store, "message", "range", TOPIC, "--begin", begin, "--end", end, "--json").json["messages"]
    assert row["message_id"] in {found["message_id"] for found in ranged}
    keyed = ("message", "key", TOPIC, "order-7", "--json", "--begin", begin, "--end")
    assert [found["message_id"] for found in ask(store, *keyed, end).json["messages"]] == [row["message_id"]]
    assert ask(store, *keyed, begin).code == 5  # The end is excluded, as in a range.
    assert ask(store, "message", "range", TOPIC, "--count").out == f"{COUNT}\n"
    assert ask(store, "message", "range", TOPIC, "--count", "--tag", "even").out == f"{COUNT // 2}\n"
    assert ask(store, "message", "range", TOPIC, "--count", "--begin", "1ms", "--end", "now").code == 0


def test_message_not_found_exits_5(store: Path) -> None:
    assert ask(store, "message", "key", TOPIC, "nothing").code == 5
    assert ask(store, "message", "offset", TOPIC, 0, 9999).code == 5
    assert ask(store, "message", "get", "7F00000100002A9F0000000000FFFFFF").code == 5


@pytest.mark.parametrize("name", ["nope", ""])
@pytest.mark.parametrize(
    "command",
    [
        ("tail",),
        ("tail", "-f"),
        ("topic", "info"),
        ("message", "range"),
        ("message", "range", "--count"),
        ("message", "scan", "--topic"),
    ],
)
def test_topic_not_found_exits_5(store: Path, command: tuple[str, ...], name: str) -> None:
    asked = ask(store, *command, name)
    assert asked.code == 5
    assert f"no topic {name!r}; mqproc topic list lists the topics" in asked.err


def test_scan_finds_messages_of_a_deleted_topic(store: Path) -> None:
    assert ask(store, "send", "gone", "left over").code == 0
    _settled(store)
    assert ask(store, "topic", "delete", "gone", "--yes").code == 0
    found = ask(store, "message", "scan", "--topic", "gone", "--json")
    assert (found.code, [row["topic"] for row in found.json_lines]) == (0, ["gone"])
    assert ask(store, "message", "range", "gone").code == 5


def test_scan_by_property_and_body_continues_at_cursor(store: Path) -> None:
    rows = ask(store, "message", "scan", "--topic", TOPIC, "--property", "color=c1", "--json").json_lines
    assert [row["keys"][0] for row in rows] == [f"order-{number}" for number in range(COUNT) if number % 3 == 1]
    assert len(ask(store, "message", "scan", "--contains", '"n":39', "--json").json_lines) == 1
    found: list[str] = []
    cursor: tuple[str, ...] = ()
    for _ in range(10):
        part = ask(store, "message", "scan", "--topic", TOPIC, "--property", "color=c2", "--max", 4, "--json", *cursor)
        found += [row["keys"][0] for row in part.json_lines]
        if "--cursor" not in part.err:
            break
        cursor = ("--cursor", part.err.split("--cursor ")[1].split()[0])
    assert found == [f"order-{number}" for number in range(COUNT) if number % 3 == 2]


@pytest.mark.parametrize("shape", ["table", "csv", "jsonl"])
def test_scan_interrupted_continues_without_duplicates(
    store: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    options = ("--topic", TOPIC, "--property", "color=c1", "--body", "text", "--output", shape)

    def numbers(*more: str | int) -> tuple[list[str], Outcome]:
        part = ask(store, "message", "scan", *options, *more)
        return re.findall(r'n\\*"+:(\d+)', part.out), part

    whole, _ = numbers()
    assert len(whole) == 13
    real, left = to_row if shape != "jsonl" else to_json, [5]

    def until_interrupted(*arguments: Any, **options: Any) -> dict[str, Any]:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(f"mqproc.cli.message.find.{real.__name__}", until_interrupted)
        first, interrupted = numbers()
    assert (interrupted.code, first) == (130, whole[:5])
    rest, _ = numbers("--cursor", interrupted.err.split("--cursor ")[1].split()[0])
    assert first + rest == whole


def test_scan_of_all_topics_shows_the_topic(store: Path) -> None:
    found = ask(store, "message", "scan", "--property", "KEYS=order-7", "--output", "csv").out
    assert next(csv.DictReader(found.splitlines()))["topic"] == TOPIC
    assert "topic" not in ask(store, "message", "scan", "--topic", TOPIC, "--output", "csv").out.splitlines()[0]


def test_message_get_prints_fields(store: Path) -> None:
    sent = ask(store, "message", "key", TOPIC, "order-7", "--json").json["messages"][0]["message_id"]
    text = ask(store, "message", "get", sent).out
    assert "keys              order-7" in " ".join(text.splitlines()) or "order-7" in text
    assert '{"n":7}' in text
