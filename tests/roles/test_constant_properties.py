"""The properties that all messages of a frame have: where they stand, and what of them is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mqproc.errors import BadPropertyError, BadRequestError, PropertiesTooLargeError
from mqproc.layout import properties
from mqproc.roles.writer.append_plan import UNIQUE_PREFIX_DIGITS, constant_properties
from mqproc.wire.operations.log import AppendRequest

PREFIX = "A" * UNIQUE_PREFIX_DIGITS


def request(**changes: Any) -> AppendRequest:
    return msgspec.structs.replace(AppendRequest("T", 1, unique_prefix=PREFIX), **changes)


def test_properties_stand_around_id_tag_and_keys() -> None:
    found = constant_properties(request(tag="t", gap_before_unique=b"A\x01a\x02", gap_before_tag=b"B\x01b\x02"))
    assert found.parts == (b"A\x01a\x02UNIQ_KEY\x01", b"\x02B\x01b\x02TAGS\x01t\x02", b"", b"")


def test_without_an_id_nothing_is_written_of_one() -> None:
    assert constant_properties(request(unique_prefix="", tag="t")).parts[1] == b"TAGS\x01t\x02"


def test_a_column_of_tags_takes_the_place_of_the_tag() -> None:
    large = "t" * 100_000
    assert constant_properties(request(tag=large, tags_bytes=3)).parts[1] == b"\x02"


def test_a_sharding_key_stands_between_those_of_lower_and_of_higher_buckets() -> None:
    assert properties.bucket("source") < properties.bucket(properties.SHARDING_KEY) < properties.bucket("name")
    before = b"source\x01first\x02"
    gap = before + b"name\x01last\x02"
    assert constant_properties(request(gap_before_unique=gap, sharding_bytes=4)).sharding_at == len(before)
    assert constant_properties(request(gap_before_unique=gap)).sharding_at == 0


def test_whole_strings_get_nothing_added_unless_their_messages_wait() -> None:
    gap = b"a\x01b\x02" * 100_000
    whole = request(
        properties_bytes=4, gap_before_unique=gap, gap_before_tag=gap, gap_before_keys=gap, gap_after_keys=gap
    )
    assert constant_properties(whole).parts == (b"", b"", b"", b"")
    waiting = request(properties_bytes=4, gap_after_keys=b"REAL_TOPIC\x01T\x02")
    assert constant_properties(waiting, delayed=True).parts == (b"", b"", b"", b"REAL_TOPIC\x01T\x02")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"gap_before_tag": b"no pair"}, BadPropertyError),
        ({"tag": "a\x01"}, BadPropertyError),
        ({"tag": "a\x02"}, BadPropertyError),
        ({"gap_after_keys": b"n\x01" + b"v" * 32_760 + b"\x02"}, PropertiesTooLargeError),
        ({"tag": "t" * 32_768}, PropertiesTooLargeError),
    ],
)
def test_what_is_wrong_is_refused(changes: dict[str, Any], error: type[BadRequestError]) -> None:
    with pytest.raises(error):
        constant_properties(request(**changes))
