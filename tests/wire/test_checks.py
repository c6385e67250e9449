"""Filters: what RocketMQ takes passes, the rest is refused with the place."""

from __future__ import annotations

import pytest

from mqproc.errors import FilterSyntaxError
from mqproc.topic_names import FILTER_BYTES_MAX, parse_tags


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
