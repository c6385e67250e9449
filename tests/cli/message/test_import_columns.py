"""Fields become keys, tags, times and queues; what cannot is told with record, field and value."""

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


def test_one_key_field_is_a_text_each_and_spaces_become_underscores() -> None:
    assert columns(FieldNames(keys=("a",)), a=["x", None, "b c", 7]).keys == ["x", "", "b_c", "7"]


def test_several_key_fields_are_lists_without_doubles_and_empty_ones() -> None:
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
def test_keys_and_tags_are_what_json_has_for_a_value(value: Any, text: str) -> None:
    found = columns(FieldNames(keys=("a",), tag="a"), a=[value])
    assert found.keys == [text]
    assert found.tags == [text.replace("_", " ")]


def test_columns_not_asked_for_are_none() -> None:
    found = columns(FieldNames(tag="t"), t=["x", None])
    assert (found.keys, found.tags, found.born_timestamps_ms, found.queue_ids) == (None, ["x", ""], None, None)


def test_queues_are_numbers() -> None:
    assert columns(FieldNames(queue="q"), q=["0", 3]).queue_ids == [0, 3]
    with pytest.raises(BadMessageError, match=r"a\.csv: record 12: field 'q' = 'x' is not a queue id"):
        columns(FieldNames(queue="q"), q=["0", "x"])


def test_a_queue_is_a_whole_number_also_where_its_column_has_fractions() -> None:
    assert columns(FieldNames(queue="q"), q=[WrittenNumber("2.0"), decimal.Decimal("3.00")]).queue_ids == [2, 3]


@pytest.mark.parametrize("value", [1.7, WrittenNumber("1.7"), decimal.Decimal("0.5"), True, 1 << 70, 1e300, None])
def test_what_is_no_whole_number_is_no_queue(value: Any) -> None:
    """Cut to one it would be another queue, and nobody would be told."""
    with pytest.raises(BadMessageError, match=r"a\.csv: record 11: field 'q' = .* is not a queue id"):
        columns(FieldNames(queue="q"), q=[value])


@pytest.mark.parametrize("text", ["-99999999999999999999", "99999999999999999999"])
def test_a_number_that_is_no_time_is_told_with_record_and_field(text: str) -> None:
    with pytest.raises(BadMessageError, match=r"record 11: field 't' = .* is not a time: (after|not a 64-bit)"):
        columns(FieldNames(time="t"), t=[text])


def test_a_record_without_time_was_born_now() -> None:
    found = columns(FieldNames(time="t"), t=["2013-01-01T10:00:00Z", None, "2013-01-01T10:00:00Z"])
    assert found.born_timestamps_ms == [1_357_034_400_000, NOW, 1_357_034_400_000]


def test_a_time_that_is_none_is_told() -> None:
    with pytest.raises(BadMessageError, match=r"a\.csv: record 12: field 't' = 'soon' is not a time"):
        columns(FieldNames(time="t"), t=["2013-01-01", "soon"])


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, "9" * 400 + ".0"])
def test_a_time_that_no_text_or_number_is_told_too(value: Any) -> None:
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
def test_times_of_fields(value: Any, form: str, expected: int) -> None:
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
def test_times_of_smaller_units(value: Any, form: str, expected: int) -> None:
    assert parse_field_time(value, form) == expected


@pytest.mark.parametrize(("value", "form"), [("1795617351087999", "auto"), (10**18, "ms"), ("1e3", "us"), ("x", "ns")])
def test_a_number_that_is_no_moment_in_its_unit_is_refused(value: Any, form: str) -> None:
    with pytest.raises(ValueError, match=r"after the year 9999|not a number"):
        parse_field_time(value, form)
    with pytest.raises(BadMessageError, match=r"a\.csv: record 12: field 't' = .* is not a time"):
        columns(FieldNames(time="t", time_format=form), t=[None, value])


def test_a_chunk_without_some_records_is_cut_at_them() -> None:
    chunk = Chunk(10, [b"a", b"b", b"c", b"d"], {"k": [1, 2, 3, 4]})
    parts = without(chunk, frozenset({10, 12, 99}))
    assert [(part.first, part.bodies, part.fields["k"]) for part in parts] == [(11, [b"b"], [2]), (13, [b"d"], [4])]
    assert without(chunk, frozenset({1})) == [chunk]
    assert without(chunk, frozenset(range(10, 14))) == []
