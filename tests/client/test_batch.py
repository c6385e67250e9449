"""Columns of a batch that is split by frame size or by delivery time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mqproc import BadMessageError, BadRequestError
from mqproc.client.batch import Batch, by_time
from mqproc.client.encoding import FRAME_MESSAGES_MAX, encode_batch

LARGE = FRAME_MESSAGES_MAX + 1


def encoded(count: int, columns: Mapping[str, Any]) -> None:
    """Encode a batch; errors are raised before its first frame."""
    next(encode_batch(Batch("t", [b"x"] * count, **columns), 1 << 24))


def waiting(count: int, columns: Mapping[str, Any]) -> None:
    """Cut a batch by times."""
    by_time(Batch("t", [b"x"] * count, deliver_at_ms=[5, 7] * (count // 2) + [5] * (count % 2), **columns))


CUT = pytest.mark.parametrize(
    ("cut", "count"), [(encoded, LARGE), (waiting, 3)], ids=["larger than a frame", "by times"]
)


@CUT
@pytest.mark.parametrize("more", [1, -1], ids=["too long", "too short"])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("keys", "k", "{:,} keys for {:,} bodies"),
        ("tags", "t", "{:,} tags for {:,} bodies"),
        ("properties", {"a": "b"}, "{:,} properties for {:,} bodies"),
        ("flags", 1, r"\({},\) flags for {:,} bodies"),
        ("queue_ids", 0, r"\({},\) queue ids for {:,} bodies"),
        ("born_timestamps_ms", 5, r"\({},\) born times for {:,} bodies"),
    ],
)
def test_batch_column_of_wrong_length_is_refused_before_sending(
    cut: Any, count: int, more: int, name: str, value: object, expected: str
) -> None:
    with pytest.raises(BadMessageError, match=expected.format(count + more, count)):
        cut(count, {name: [value] * (count + more)})


def test_batch_sharding_keys_of_wrong_length_are_refused() -> None:
    with pytest.raises(BadMessageError, match="65,538 sharding keys for 65,537 bodies"):
        encoded(LARGE, {"sharding_keys": ["a"] * (LARGE + 1)})


@CUT
@pytest.mark.parametrize("name", ["keys", "tags", "properties", "queue_ids", "flags", "born_timestamps_ms"])
@pytest.mark.parametrize("column", [5, {"a"}, iter("a"), b"a", np.array(5)], ids=lambda of: type(of).__name__)
def test_batch_invalid_column_is_refused(cut: Any, count: int, name: str, column: object) -> None:
    with pytest.raises(BadRequestError, match=name.partition("_")[0].rstrip("s")):
        cut(count, {name: column})


def test_batch_text_as_bodies_is_refused() -> None:
    with pytest.raises(BadMessageError, match="bodies must be a list of bytes, or a numpy or Arrow array, not str"):
        next(encode_batch(Batch("t", "x" * LARGE), 1 << 24))


def test_columns_of_pandas_go_by_place_and_not_by_label() -> None:
    flags = pd.Series([1, 2, 3], index=[2, 0, 1])
    parts, places = by_time(Batch("t", [b"1", b"2", b"3"], deliver_at_ms=[9, 5, 9], flags=flags))
    assert places is not None
    assert places.tolist() == [1, 0, 2]
    assert [(part.bodies, list(part.flags)) for part in parts] == [([b"2"], [2]), ([b"1", b"3"], [1, 3])]
