"""What frames of one kind have in common, and that nothing is kept of one that is refused or waits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mqproc.errors import BadMessageError, BadPropertyError, BadRequestError, PropertiesTooLargeError
from mqproc.process.frame_kinds import KINDS_MAX, UNIQUE_PREFIX_DIGITS, kind_of, parked_kind
from mqproc.wire.operations import AppendRequest

PREFIX = "A" * UNIQUE_PREFIX_DIGITS


def request(**changes: Any) -> AppendRequest:
    return msgspec.structs.replace(AppendRequest("T", 1, unique_prefix=PREFIX), **changes)


def test_properties_stand_around_id_tag_and_keys() -> None:
    kind = kind_of(request(tag="t", gap_before_unique=b"A\x01a\x02", gap_before_tag=b"B\x01b\x02"))
    assert kind[:4] == (b"A\x01a\x02UNIQ_KEY\x01", b"\x02B\x01b\x02TAGS\x01t\x02", b"", b"")


def test_without_an_id_nothing_is_written_of_one() -> None:
    assert kind_of(request(unique_prefix="", tag="t")).before_tag == b"TAGS\x01t\x02"


def test_a_column_of_tags_takes_the_place_of_the_tag() -> None:
    assert kind_of(request(tag="t", tags_bytes=3)).before_tag == b"\x02"


@pytest.mark.parametrize(
    "changes",
    [
        {"has_born": True},
        {"has_flags": True},
        {"has_queues": True},
        {"has_prepared": True},
        {"properties_bytes": 0},
        {"sharding_bytes": 0},
    ],
)
def test_further_columns_are_told(changes: dict[str, Any]) -> None:
    assert kind_of(request(**changes)).more_columns
    assert not kind_of(request(keys_bytes=5, tags_bytes=5)).more_columns


def test_frames_that_differ_in_ids_sizes_times_and_topic_are_of_one_kind() -> None:
    first = kind_of(request(tag="same"))
    other = request(
        tag="same",
        topic="U",
        count=9,
        queue_id=3,
        bodies_bytes=90,
        keys_bytes=8,
        unique_prefix="B" * UNIQUE_PREFIX_DIGITS,
        unique_counter=7,
        born_timestamp_ms=5,
        flag=1,
    )
    assert kind_of(other) is first


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"born_host": b"\x7f"}, BadMessageError),
        ({"gap_before_tag": b"no pair"}, BadPropertyError),
        ({"tag": "a\x01"}, BadPropertyError),
        ({"gap_after_keys": b"n\x01" + b"v" * 32_760 + b"\x02"}, PropertiesTooLargeError),
    ],
)
def test_what_is_wrong_is_refused_each_time(changes: dict[str, Any], error: type[BadRequestError]) -> None:
    for _ in range(2):
        with pytest.raises(error):
            kind_of(request(**changes))


@pytest.mark.parametrize("changes", [{"tags_bytes": 0}, {"properties_bytes": 0}])
def test_what_does_not_count_is_not_kept(changes: dict[str, Any]) -> None:
    """Nothing has checked its size."""
    large = request(tag="t" * 100_000, **changes)
    assert kind_of(large) is kind_of(request(**changes))


def test_whole_strings_have_no_constant_properties() -> None:
    gap = b"a\x01b\x02" * 100_000
    large = request(
        properties_bytes=0, gap_before_unique=gap, gap_before_tag=gap, gap_before_keys=gap, gap_after_keys=gap
    )
    assert kind_of(large) is kind_of(request(properties_bytes=0))


def test_whole_strings_get_nothing_added_unless_their_messages_wait() -> None:
    whole = request(properties_bytes=4, gap_after_keys=b"REAL_TOPIC\x01T\x02")
    assert kind_of(whole).after_keys == b""
    assert parked_kind(whole).after_keys == b"REAL_TOPIC\x01T\x02"
    assert kind_of(whole).after_keys == b""


def test_older_kinds_are_made_again() -> None:
    first = kind_of(request(tag="first"))
    for number in range(KINDS_MAX):
        kind_of(request(tag=f"other {number}"))
    assert kind_of(request(tag="first")) == first
