"""RocketMQ's own property names, and tags that no filter matches, are refused on each path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mqproc.client.batch import Batch
from mqproc.client.encoding import check_message, encode_batch, encode_message, encode_messages
from mqproc.client.replay import OWN_PROPERTIES, copy_of
from mqproc.client.send_requests import send, send_oneway
from mqproc.client.transaction_requests import half_message
from mqproc.errors import BadPropertyError
from mqproc.layout.properties import RESERVED, TAGS, encode
from mqproc.topic_names import parse_tags
from mqproc.types import Message
from tests.support.records import decode_record, encode_record

UNMATCHABLE = ["*", "a||b", "||", " a", "a ", " ", "\t", "a\n", "\u3000a", "a\u2028"]
MATCHABLE = ["a", "a|b", "|", "a | b", "a b", "**", "*a", "é", "a\u3000b", "漢字"]
FRAME_BYTES = 1 << 20
Send = Callable[[Message], Any]
SENDS: dict[str, Send] = {
    "send": send,
    "oneway": lambda message: send_oneway(message, FRAME_BYTES),
    "single": encode_message,
    "many": lambda message: encode_messages([message, message]),
    "check": check_message,
    "transaction": lambda message: send(half_message("g", message, None), transaction=True),
    "batch": lambda message: list(
        encode_batch(Batch("t", [b""], tags=message.tag, properties=message.properties), 1 << 20)
    ),
    "columns": lambda message: list(
        encode_batch(Batch("t", [b"", b""], tags=["x", message.tag], properties=[{}, message.properties]), FRAME_BYTES)
    ),
    "tag column": lambda message: list(
        encode_batch(Batch("t", [b"", b""], tags=["x", message.tag], properties=message.properties), FRAME_BYTES)
    ),
}


@pytest.mark.parametrize("way", SENDS.values(), ids=SENDS)
def test_reserved_property_is_refused_with_what_to_use(way: Send) -> None:
    for name, use in RESERVED.items():
        with pytest.raises(BadPropertyError, match=f"{name}.*reserved: {use}"):
            way(Message("t", b"", properties={name: "1"}))


@pytest.mark.parametrize(
    "name", ["DELAY", "TIMER_DELIVER_MS", "TIMER_DEL_UNIQKEY", "REAL_TOPIC", "POP_CK", "RETRY_TOPIC"]
)
def test_system_property_is_reserved(name: str) -> None:
    assert name in RESERVED
    assert name in OWN_PROPERTIES, "a replay leaves it out"


@pytest.mark.parametrize("way", SENDS.values(), ids=SENDS)
@pytest.mark.parametrize("properties", [{}, {"zone": "north"}], ids=["plain", "properties"])
def test_tag_that_no_filter_matches_is_refused(way: Send, properties: dict[str, str]) -> None:
    for tag in UNMATCHABLE:
        with pytest.raises(BadPropertyError, match="no filter can match"):
            way(Message("t", b"", tag, properties=properties))
    for tag in MATCHABLE:
        assert parse_tags(tag) == [tag]
        way(Message("t", b"", tag, properties=properties))


def test_tag_columns_may_touch_each_others_bars() -> None:
    frames = list(encode_batch(Batch("t", [b""] * 4, tags=["a|", "|b", "", "c"]), FRAME_BYTES))
    assert frames[0].count == 4


@pytest.mark.parametrize("tag", UNMATCHABLE)
def test_replay_copies_any_stored_tag(tag: str) -> None:
    """A RocketMQ producer may have sent it."""
    stored = decode_record(encode_record(topic="t", body=b"", properties=encode({TAGS: tag, "zone": "north"})))
    frame = encode_messages([copy_of(stored, "u", 0, "0" * 32)])
    assert f"TAGS\x01{tag}\x02".encode() in b"".join(map(bytes, frame.payload))
