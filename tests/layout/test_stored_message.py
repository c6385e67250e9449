"""StoredMessage: a value that is copied, pickled, compared and shown."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from mqproc.layout.record_codec import as_redelivered, decode_record, stored_message, with_properties
from mqproc.types import MESSAGE_FIELDS, StoredMessage
from tests.support.records import encode_record


def one(properties: str = "TAGS\x01new\x02KEYS\x01k1 k2\x02UNIQ_KEY\x01U\x02__SHARDINGKEY\x01s\x02") -> StoredMessage:
    return decode_record(encode_record(topic="orders", body=b"body", properties=properties, queue_offset=7))


def test_message_is_a_value() -> None:
    message = one()
    assert message == one()
    assert hash(message) == hash(one())
    assert message != one("TAGS\x01old\x02")
    assert pickle.loads(pickle.dumps(message)) == copy.copy(message) == copy.deepcopy(message) == message
    assert msgspec.structs.replace(message, tag="old").keys == ("k1", "k2")
    with pytest.raises(AttributeError):
        message.body = b""  # type: ignore[misc]
    with pytest.raises(AttributeError, match="'StoredMessage' object has no attribute 'bodies'"):
        message.bodies  # type: ignore[attr-defined]  # noqa: B018


def test_message_shows_every_field() -> None:
    message = one()
    assert list(message.to_json()) == [*MESSAGE_FIELDS[:-2], "body_base64"]
    assert repr(message).startswith(f"StoredMessage(message_id={message.message_id!r}, physical_offset=")
    assert repr(message).endswith("body=b'body', stored_topic='orders')")
    assert (message.unique_id, message.sharding_key) == ("U", "s")


def test_properties_are_the_callers_own() -> None:
    message = one()
    message.properties["TAGS"] = "changed"  # type: ignore[index]
    assert message.properties["TAGS"] == "new"


def test_redelivered_message_shows_the_subscribed_topic() -> None:
    retried = one("RETRY_TOPIC\x01source\x02")
    assert (as_redelivered(retried).topic, as_redelivered(retried).stored_topic) == ("source", "orders")
    assert as_redelivered(retried).to_json()["stored_topic"] == "orders"
    assert as_redelivered(one(), "given").topic == "given"
    assert as_redelivered(one()) == one()
    assert "stored_topic" not in one().to_json()


def test_properties_are_added() -> None:
    added = with_properties(one(), {"POP_CK": "handle", "TAGS": "newer"}, queue_id=3)
    assert added.properties == one().properties | {"POP_CK": "handle", "TAGS": "newer"}
    assert (added.queue_id, added.keys, added.body) == (3, ("k1", "k2"), b"body")


@pytest.mark.parametrize("sys_flag", [0, 0x10])
@pytest.mark.parametrize(
    "message_id", ["7F00000100002A9F000000000000004D", "0" * 31 + "1" + "00002A9F000000000000004D"]
)
def test_message_is_made_of_values(sys_flag: int, message_id: str) -> None:
    made = stored_message(message_id, {"a": "b"}, sys_flag=sys_flag, topic="orders", body=b"x")
    assert (made.message_id, made.physical_offset, made.properties) == (message_id, 77, {"a": "b"})
    assert made.store_host in ("127.0.0.1:10911", "[::1]:10911")
