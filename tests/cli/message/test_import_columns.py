"""Fields become keys, tags, times and queues; errors name record, field and value."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pytest

from mqproc.cli.message.import_files import ColumnMaker, FieldNames, parse_field_time, without
from mqproc.cli.message.sources import Chunk, WrittenNumber
from mqproc.errors import BadMessageError

NOW = 1_800_000_000_000


def columns(names: FieldNames, **fields: list[Any]) -> Any:
    count = len(next(iter(fields.values())))
    return ColumnMaker(names, NOW, "a.csv").columns(Chunk(10, [b""] * count, fields))


def test_key_field_replaces_spaces_by_underscores() -> None:
    assert columns(FieldNames(keys=("a",)), a=["x", None, "b c", 7]).keys == ["x", "", "b_c", "7"]


def test_key_fields_drop_duplicates_and_empty_values() -> None:
    found = columns(FieldNames(keys=("a", "b")), a=["x", None], b=["x", "y"])
    assert found.keys == [["x"], ["y"]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (1.5, "1.5"),
        (float("nan"), ""),
        (b"ok", "b2s="),
        (datetime.datetime(2020, 1, 1), "2020-01-01T00:00:00"),
        (datetime.timedelta(seconds=1), "PT1S"),
        (decimal.Decimal("1.50"), "1.50"),
        ({"a": 1}, '{"a":1}'),
        ([1, "x y"], '[1,"x_y"]'),
    ],
)
def test_keys_and_tags_are_json_values(value: Any, text: str) -> None:
    found = columns(FieldNames(keys=("a",), tag="a"), a=[value])
    assert found.keys == [text]
    assert found.tags == [text.replace("_", " ")]


def test_columns_not_requested_are_none() -> None:
    found = columns(FieldNames(tag="t"), t=["x", None])
    assert (found.keys, found.tags, found.born_timestamps_ms, found.queue_ids) == (None, ["x", ""], None, None)


def test_queues_are_numbers() -> None:
    assert columns(FieldNames(queue="q"), q=["0", 3]).queue_ids == [0, 3]
    with pytest.raises(BadMessageError, match=r"a\.csv: record 12: field 'q' = 'x' is not a queue id"):
        columns(FieldNames(queue="q"), q=["0", "x"])


def test_queue_field_accepts_whole_floats() -> None:
    assert columns(FieldNames(queue="q"), q=[WrittenNumber("2.0"), decimal.Decimal("3.00")]).queue_ids == [2, 3]


@pytest.mark.parametrize("value", [1.7, WrittenNumber("1.7"), decimal.Decimal("0.5"), True, 1 << 70, 1e300, None])
def test_queue_field_rejects_fractions(value: Any) -> None:
    """Truncation would silently choose another queue."""
    with pytest.raises(BadMessageError, match=r"a\.csv: record 11: field 'q' = .* is not a queue id"):
        columns(FieldNames(queue="q"), q=[value])


@pytest.mark.parametrize("text", ["-99999999999999999999", "99999999999999999999"])
def test_time_field_bad_number_names_record_and_field(text: str) -> None:
    with pytest.raises(BadMessageError, match=r"record 11: field 't' = .* is not a time: (after|not a 64-bit)"):
        columns(FieldNames(time="t"), t=[text])


def test_time_field_empty_uses_current_time() -> None:
    found = columns(FieldNames(time="t"), t=["2013-01-01T10:00:00Z", None, "2013-01-01T10:00:00Z"])
    assert found.born_timestamps_ms == [1_357_034_400_000, NOW, 1_357_034_400_000]


def test_time_field_invalid_text_is_refused() -> None:
    with pytest.raises(BadMessageError, match=r"a\.csv: record 12: field 't' = 'soon' is not a time"):
        columns(FieldNames(time="t"), t=["2013-01-01", "soon"])


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, "9" * 400 + ".0"])
def test_time_field_invalid_type_is_refused(value: Any) -> None:
    with pytest.raises(BadMessageError, match=r"record 11: field 't' = .* is not a time: "):
        columns(FieldNames(time="t"), t=[value])


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        ("1357034400", "auto", 1_357_034_400_000),
        ("1357034400000", "auto", 1_357_034_400_000),
        (1357034400.5, "auto", 1_357_034_400_500),
        ("1357034400", "ms", 1_357_034_400),
        ("135703440000", "s", 135_703_440_000_000),
        ("2013-01-01T10:00:00Z", "iso", 1_357_034_400_000),
        ("01/01/2013 10:00 +0000", "%d/%m/%Y %H:%M %z", 1_357_034_400_000),
        (datetime.datetime(2013, 1, 1, 10, tzinfo=datetime.UTC), "auto", 1_357_034_400_000),
    ],
)
def test_time_field_values(value: Any, form: str, expected: int) -> None:
    assert parse_field_time(value, form) == expected


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        (1_795_617_351_087_999, "us", 1_795_617_351_087),
        ("1795617351087999999", "ns", 1_795_617_351_087),
        ("1795617351087999.5", "us", 1_795_617_351_087),
        ("253402300799999", "auto", 253_402_300_799_999),
    ],
)
def test_time_field_smaller_units(value: Any, form: str, expected: int) -> None:
    assert parse_field_time(value, form) == expected


@pytest.mark.parametrize(("value", "form"), [("1795617351087999", "auto"), (10**18, "ms"), ("1e3", "us"), ("x", "ns")])
def test_time_field_out_of_range_is_refused(value: Any, form: str) -> None:
    with pytest.raises(ValueError, match=r"after the year 9999|not a number"):
        parse_field_time(value, form)
    with pytest.raises(BadMessageError, match=r"a\.csv: record 12: field 't' = .* is not a time"):
        columns(FieldNames(time="t", time_format=form), t=[None, value])


def test_without_records_splits_the_chunk() -> None:
    chunk = Chunk(10, [b"a", b"b", b"c", b"d"], {"k": [1, 2, 3, 4]})
    parts = without(chunk, frozenset({10, 12, 99}))
    assert [(part.first, part.bodies, part.fields["k"]) for part in parts] == [(11, [b"b"], [2]), (13, [b"d"], [4])]
    assert without(chunk, frozenset({1})) == [chunk]
    assert without(chunk, frozenset(range(10, 14))) == []
