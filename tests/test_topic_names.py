"""Topic names: RocketMQ's valid names pass; others are rejected with the offending byte."""

from __future__ import annotations

import pytest

from mqproc.errors import BadTopicError, FilterSyntaxError
from mqproc.layout import queue_table, record
from mqproc.topic_names import FILTER_BYTES_MAX, RETRY_TOPIC_BYTES_MAX, TOPIC_BYTES_MAX, check_topic, parse_tags


@pytest.mark.parametrize(
    "topic", ["a", "%RETRY%group", "%RETRY%" + "t" * 128, "a|b-c_d%9", "t" * 127, "%RETRY%" + "t" * 248]
)
def test_topic_name_valid_in_rocketmq_is_accepted(topic: str) -> None:
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
def test_topic_name_invalid_is_refused(topic: str, text: str) -> None:
    with pytest.raises(BadTopicError, match=text):
        check_topic(topic)


def test_topic_name_of_any_valid_length_fits_formats() -> None:
    assert TOPIC_BYTES_MAX == record.TOPIC_V1_CHARACTERS_MAX
    assert RETRY_TOPIC_BYTES_MAX == record.TOPIC_SIZE_MAX == queue_table.TOPIC_BYTES_MAX


@pytest.mark.parametrize(
    ("expression", "tags"),
    [("", []), ("*", []), (" * ", []), ("a", ["a"]), ("a || b", ["a", "b"]), ("a||b|| ", ["a", "b"]), ("a || *", [])],
)
def test_tag_filter_is_parsed_as_in_rocketmq(expression: str, tags: list[str]) -> None:
    assert parse_tags(expression) == tags


@pytest.mark.parametrize(
    ("expression", "position"), [("||", 0), ("a || b\x01", 6), ("a" * (FILTER_BYTES_MAX + 1), FILTER_BYTES_MAX)]
)
def test_tag_filter_malformed_names_position(expression: str, position: int) -> None:
    with pytest.raises(FilterSyntaxError) as caught:
        parse_tags(expression)
    assert caught.value.position == position
