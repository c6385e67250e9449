"""Names of topics and filters: what RocketMQ takes passes, the rest is refused with the offending byte or place."""

from __future__ import annotations

import pytest

from mqproc.errors import BadTopicError, FilterSyntaxError
from mqproc.wire.checks import FILTER_BYTES_MAX, check_topic, parse_tags


@pytest.mark.parametrize("topic", ["a", "%RETRY%group", "a|b-c_d%9", "t" * 127, "%RETRY%" + "t" * 248])
def test_rocketmqs_names_pass(topic: str) -> None:
    check_topic(topic)


@pytest.mark.parametrize(
    ("topic", "text"),
    [
        ("", "empty"),
        ("a/b", "0x2F at 1"),
        ("..", "0x2E at 0"),
        ("a\0", "0x00 at 1"),
        ("a b", "0x20 at 1"),
        ("é", "0xC3 at 0"),
        ("\ud800", "0xED at 0"),
        ("t" * 128, "128 bytes exceeds 127"),
        ("%RETRY%" + "t" * 249, "256 bytes exceeds 255"),
    ],
)
def test_other_names_are_refused(topic: str, text: str) -> None:
    with pytest.raises(BadTopicError, match=text):
        check_topic(topic)


@pytest.mark.parametrize(
    ("expression", "tags"),
    [("", []), ("*", []), (" * ", []), ("a", ["a"]), ("a || b", ["a", "b"]), ("a||b|| ", ["a", "b"]), ("a || *", [])],
)
def test_filters_are_parsed_as_rocketmq_does(expression: str, tags: list[str]) -> None:
    assert parse_tags(expression) == tags


@pytest.mark.parametrize(
    ("expression", "position"), [("||", 0), ("a || b\x01", 6), ("a" * (FILTER_BYTES_MAX + 1), FILTER_BYTES_MAX)]
)
def test_malformed_filters_tell_the_place(expression: str, position: int) -> None:
    with pytest.raises(FilterSyntaxError) as caught:
        parse_tags(expression)
    assert caught.value.position == position
