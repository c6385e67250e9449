"""Reads with filters by tags and properties: exact matches in bounded steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import BadRequestError, FilterSyntaxError
from mqproc.filters.compiler import compiled
from mqproc.kernels.gather import RECORD_SCAN_COST
from mqproc.layout.record_codec import decode_records
from mqproc.store.cooperative import finish
from mqproc.store.read import by_time, unit_walk
from mqproc.store.read import pull as pull_module
from mqproc.types import PullStatus, StoredMessage
from tests.filters.expressions import Expressions
from tests.support.records import decode_record
from tests.support.store_builders import EVERYTHING, FIRST_MS, LiveStore

COUNT = 400
REGIONS = ("north", "south", "east")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStore]:
    """Message n has tag Tag(n mod 5), region and, unless n is a multiple of 7, the price n.25."""
    new = LiveStore(tmp_path_factory.mktemp("store"))
    for number in range(COUNT):
        properties = f"region\x01{REGIONS[number % 3]}\x02"
        if number % 7:
            properties += f"price\x01{number}.25\x02"
        tag = f"Tag{number % 5}"
        parts = (b"", properties.encode(), b"", b"")
        new.append("Orders", [b"%d" % number], FIRST_MS + number, queues=1, tags=[tag], parts=parts)
    new.dispatch()
    yield new
    new.close()


def pulled(store: LiveStore, sql: str, topic: str = "Orders", tags: Sequence[str] = ()) -> list[int]:
    """Pull to the end of the queue; return the numbers of matching messages."""
    offset, found = 0, []
    while True:
        answer = store.reading.pull(topic, 0, offset, 1000, EVERYTHING, tags, sql=sql)
        if answer.status is PullStatus.OFFSET_OVERFLOW_ONE:
            return found
        assert answer.next_offset > offset
        found += [int(message.body) for message in decode_records(answer.records.data)]
        offset = answer.next_offset


@pytest.mark.parametrize(
    ("sql", "matches"),
    [
        ("region = 'north'", lambda n: n % 3 == 0),
        ("price > 100.5 AND region IN ('north', 'south')", lambda n: n % 7 and n > 100 and n % 3 < 2),
        ("price IS NULL", lambda n: n % 7 == 0),
        ("NOT (price > 100)", lambda n: False),  # "1.25" is not an integer.
        ("TAGS = 'Tag3'", lambda n: n % 5 == 3),
        ("TAGS IN ('Tag1', 'Tag2') AND region <> 'east'", lambda n: n % 5 in (1, 2) and n % 3 < 2),
        ("TAGS = 'Tag1' AND TAGS = 'Tag2'", lambda n: False),
        ("price > 0x5", None),
        ("price < 1e300 OR region = 'east'", lambda n: n % 7 or n % 3 == 2),
    ],
)
def test_filter_sql_selects_matching_messages(store: LiveStore, sql: str, matches: object) -> None:
    if matches is None:
        with pytest.raises(FilterSyntaxError) as caught:
            pulled(store, sql)
        assert caught.value.position == 9
        return
    expected = [number for number in range(COUNT) if matches(number)]  # type: ignore[operator]
    assert pulled(store, sql) == expected
    cursor: Sequence[int] = ()
    ranged: list[int] = []
    while True:
        batch = finish(
            store.reading.range("Orders", 0, 1 << 62, sql=sql, cursor=cursor, max_messages=17, max_bytes=1 << 20)
        )
        ranged += [int(message.body) for part in batch.records for message in decode_records(part.data)]
        if batch.complete:
            break
        cursor = batch.cursor
    assert ranged == expected
    assert finish(store.reading.count("Orders", sql=sql)) == len(expected)


def test_filter_random_expressions_match_the_interpreter(tmp_path: Path) -> None:
    """Includes numbers that the kernel leaves to Python."""
    store = LiveStore(tmp_path)
    source = Expressions(seed=7)
    messages = [source.message() for _ in range(200)]
    for number, properties in enumerate(messages):
        whole = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
        store.append("T", [b"%d" % number], queues=1, parts=(b"", whole.encode(), b"", b""))
    store.dispatch()
    tried = 0
    while tried < 60:
        expression = source.expression()
        try:
            filtering = compiled(expression)
        except FilterSyntaxError:
            continue
        tried += 1
        expected = [number for number, properties in enumerate(messages) if filtering.matches(properties)]
        assert pulled(store, expression, "T") == expected, expression
    store.close()


def test_filter_python_fallback_copies_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It once copied the segment for each record; a non-ASCII number blocked the query role."""
    sizes: list[int] = []

    def decode(buffer: memoryview, **options: Any) -> StoredMessage:
        sizes.append(buffer.nbytes)
        return decode_record(buffer, **options)

    monkeypatch.setattr(unit_walk, "decode_record", decode)
    store = LiveStore(tmp_path)
    for number, amount in enumerate(("é", "5", "٥", "6")):
        properties = f"amount\x01{amount}\x02".encode()
        store.append("T", [b"%d" % number], queues=1, parts=(b"", properties, b"", b""))
    store.dispatch()
    assert pulled(store, "amount = 5", "T") == [1, 2]
    assert len(sizes) == 2
    assert max(sizes) < 1000
    store.close()


def test_filter_python_fallback_uses_shorter_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes fifty times as long per record, so its steps have fewer records."""
    store = LiveStore(tmp_path)
    parts = (b"", "amount\x01é\x02".encode(), b"", b"")
    store.append("T", [b"0"] * 20, queues=1, parts=parts)
    store.dispatch()
    monkeypatch.setattr(pull_module, "LOOK_BYTES_MAX", 4 * unit_walk.DECIDED_LOOK_BYTES)
    assert store.reading.pull("T", 0, 0, 1000, EVERYTHING, sql="amount = 5").next_offset == 4
    assert pulled(store, "amount = 5", "T") == []
    store.close()


def test_filter_few_matches_searches_in_bounded_steps(store: LiveStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer and each slice of a range advances by a bounded number of units."""
    size = len(store.reading.pull("Orders", 0, 0, 1, EVERYTHING).records)
    monkeypatch.setattr(pull_module, "LOOK_BYTES_MAX", 10 * (size + RECORD_SCAN_COST))
    offset, answers = 0, 0
    while (answer := store.reading.pull("Orders", 0, offset, 1000, EVERYTHING, sql="price = 398.25")).count == 0:
        assert answer.status is PullStatus.NO_MATCHED_MESSAGE
        assert offset < answer.next_offset <= offset + 12
        offset, answers = answer.next_offset, answers + 1
    assert decode_records(answer.records.data)[0].body == b"398"
    assert answers >= COUNT // 12
    monkeypatch.setattr(by_time, "SLICE_LOOK_BYTES", 10 * (size + RECORD_SCAN_COST))
    slices = list(store.reading.count("Orders", sql="price = 398.25"))
    assert len(slices) >= COUNT // 12
    # Units whose hash cannot match are skipped without reading a record.
    assert store.reading.pull("Orders", 0, 0, 1000, EVERYTHING, sql="TAGS = 'none' AND price > 1").next_offset == COUNT


def test_filter_sql_with_tags_is_rejected(store: LiveStore) -> None:
    with pytest.raises(BadRequestError, match="not by both"):
        pulled(store, "price > 1", tags=["Tag1"])


def test_filter_syntax_error_is_raised_first(store: LiveStore) -> None:
    with pytest.raises(FilterSyntaxError):
        store.reading.pull("Unknown", 0, 99, 1, EVERYTHING, sql="a >")
