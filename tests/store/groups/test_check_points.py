"""Check points as RocketMQ writes them: what one says is read back, and what nobody can read says nothing."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from mqproc.errors import BadRequestError
from mqproc.layout.record_codec import decode_record, encode_record
from mqproc.store.offsets.pop_receipts import PopAck, PopCheckPoint, parse_handle, read
from mqproc.topic_names import REVIVE_TOPIC
from mqproc.types import StoredMessage

POINT = PopCheckPoint("billing", "orders", 3, 120, (120, 121, 125), 1_700_000_000_000, 30_000, 5, "mqproc")


def said(body: bytes, tag: str = "ck") -> StoredMessage:
    """A message of the revive topic, queue 5, offset 7."""
    message = decode_record(encode_record(topic=REVIVE_TOPIC, body=body, properties="", queue_id=5, queue_offset=7))
    return replace(message, tag=tag)


def test_a_check_point_is_read_back() -> None:
    found = read(said(POINT.body()))
    assert isinstance(found, PopCheckPoint)
    assert (found.key, found.offsets, found.due_ms) == (POINT.key, POINT.offsets, 1_700_000_030_000)
    assert (found.revive_queue, found.revive_offset, found.open) == (5, 7, {120, 121, 125})
    assert msgspec.json.decode(POINT.body()) == {
        "so": 120,
        "pt": 1_700_000_000_000,
        "it": 30_000,
        "bm": 0,
        "n": 3,
        "q": 3,
        "t": "orders",
        "c": "billing",
        "ro": 0,
        "d": [0, 1, 5],
        "bn": "mqproc",
    }


def test_rocketmqs_older_ones_have_a_number_and_a_bitmap_of_what_is_done() -> None:
    found = read(said(b'{"so":9,"pt":5,"it":6,"bm":5,"n":4,"q":0,"t":"T","c":"g"}'))
    assert isinstance(found, PopCheckPoint)
    assert (found.offsets, found.open) == ((9, 10, 11, 12), {10, 12})


@pytest.mark.parametrize(("offsets", "tag"), [((121,), "ack"), ((120, 125), "bAck")])
def test_acknowledgements_are_read_back(offsets: tuple[int, ...], tag: str) -> None:
    assert read(said(POINT.ack_body(offsets), tag)) == PopAck(POINT.key, offsets)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"so":"x"}', b'{"so":1,"pt":1,"q":0,"t":"T","c":"g"}'])
@pytest.mark.parametrize("tag", ["ck", "ack"])
def test_what_nobody_can_read_says_nothing(body: bytes, tag: str) -> None:
    assert read(said(body, tag)) is None


def test_a_handle_names_its_check_point() -> None:
    handle = f"{POINT.handle()} 121"
    assert handle == "120 1700000000000 30000 5 0 mqproc 3 121"
    assert parse_handle("billing", "orders", handle) == (POINT.key, 121)


@pytest.mark.parametrize("handle", ["", "1 2 3", "120 1700000000000 30000 5 0 mqproc 3 x", "-1 2 3 4 5 b 6 7"])
def test_other_text_is_no_handle(handle: str) -> None:
    with pytest.raises(BadRequestError, match="no handle of a received message"):
        parse_handle("billing", "orders", handle)
