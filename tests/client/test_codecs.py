"""Codecs: values in place of bodies, encoded by sends and decoded by `message.value`."""

from __future__ import annotations

import asyncio
import datetime
import pickle
from typing import Any

import msgspec
import pytest

from mqproc import AsyncClient, Batch, Client, Message
from mqproc.client.codecs import codec_of
from mqproc.errors import BadMessageError, BadRequestError, BadTimeError
from mqproc.types import StoredMessage, message_type
from tests.support.group import PATIENCE_S, Group

VALUE = {"order": 1, "items": ["é", 2.5]}


class Reversed:
    """A user's codec."""

    def encode(self, value: str) -> bytes:
        return value[::-1].encode()

    def decode(self, body: bytes) -> str:
        return body.decode()[::-1]


@pytest.mark.parametrize(
    ("codec", "value", "body"),
    [
        ("json", VALUE, msgspec.json.encode(VALUE)),
        ("msgpack", VALUE, msgspec.msgpack.encode(VALUE)),
        ("text", "grün", "grün".encode()),
        (Reversed(), "abc", b"cba"),
    ],
    ids=("json", "msgpack", "text", "own"),
)
def test_every_send_encodes_and_every_read_decodes(shared: Group, codec: Any, value: Any, body: bytes) -> None:
    topic = f"values-{getattr(codec, 'title', lambda: 'own')()}"
    with Client(shared.store, timeout=PATIENCE_S, codec=codec) as client:
        sent = client.send(topic, value, keys="k", queue_id=0)
        client.send(Message(topic, value, queue_id=0))
        client.send_many([Message(topic, value, queue_id=0)] * 2)
        client.send_batch(topic, [value, value], queue_id=0)
        list(client.send_batches([Batch(topic, [value], queue_id=0)]))
        with client.producer() as producer:
            producer.send(topic, value, queue_id=0)
        with client.transaction("billing", Message(topic, value, queue_id=0)):
            pass
        client.send(topic, body, queue_id=0)  # Bytes are a body already.
        client.wait_dispatched()
        with client.consumer("values", topic, start="earliest") as consumer:
            found = consumer.receive(16, timeout=PATIENCE_S)
            while len(found) < 10:
                found += consumer.receive(16, timeout=PATIENCE_S)
            consumer.ack(*found)
        for message in (client.get(sent.message_id), *client.by_key(topic, "k"), *client.range(topic), *found):
            assert (message.body, message.value) == (body, value)
            assert pickle.loads(pickle.dumps(message)).body == body
    with Client(shared.store) as client:
        (message,) = client.pull(topic, 0, 0, 1).messages
        with pytest.raises(BadRequestError, match="the client that read this message has no codec"):
            _ = message.value


def test_async_send_encodes_a_value_as_it_was_passed(shared: Group) -> None:
    async def go() -> None:
        async with AsyncClient(shared.store, codec="json") as client:
            value: dict[str, Any] = {"nested": [1]}
            message = Message("async-values", value)
            sends = client.send("async-values", value), client.send(message), client.send_batch("async-values", [value])
            value["nested"].append(2)
            for send in sends:
                await send
            assert [message.value async for message in client.range("async-values")] == [{"nested": [1]}] * 3

    asyncio.run(go())


def test_errors_of_codecs_name_value_and_message(shared: Group) -> None:
    with Client(shared.store, codec="json") as client:
        with pytest.raises(BadMessageError, match=r"the codec json cannot encode <object .* of type object: "):
            client.send("bad-values", object())
        client.send("bad-values", b"{" * 100, queue_id=3)
        (message,) = client.pull("bad-values", 3, 0).messages
        with pytest.raises(BadMessageError) as raised:
            _ = message.value
        place = f"message {message.message_id} of bad-values, queue 3, offset 0: the codec json cannot decode b'{{{{"
        assert str(raised.value).startswith(place)
        assert "… of 100 bytes: " in str(raised.value)
    with pytest.raises(BadRequestError, match="codec = 'yaml': give json, msgpack, text, or an object with encode"):
        Client(shared.store, codec="yaml")  # type: ignore[arg-type]


def test_copies_of_a_client_have_its_codec(shared: Group) -> None:
    with Client(shared.store, codec="json") as client, pickle.loads(pickle.dumps(client)) as copied:
        copied.send("copied-values", VALUE, queue_id=0)
        assert copied.pull("copied-values", 0, 0).messages[0].value == VALUE


def test_message_type_is_one_per_codec() -> None:
    assert message_type(None) is StoredMessage
    assert message_type(codec_of("json")) is message_type(codec_of("json"))


def test_times_of_a_message_are_datetimes_in_utc() -> None:
    message = StoredMessage(store_timestamp_ms=1_700_000_000_123, born_timestamp_ms=-1)
    assert message.stored_at == datetime.datetime(2023, 11, 14, 22, 13, 20, 123_000, datetime.UTC)
    assert message.born_at == datetime.datetime(1969, 12, 31, 23, 59, 59, 999_000, datetime.UTC)
    with pytest.raises(BadTimeError, match="outside of the years 1 to 9999"):
        _ = StoredMessage(store_timestamp_ms=1 << 60).stored_at


def test_repr_shows_short_bodies_and_cuts_long_ones(shared: Group) -> None:
    assert repr(Message("orders", b"paid", tag="new")) == "Message(topic='orders', body=b'paid', tag='new')"
    assert repr(Message("orders", b"x" * 100)).endswith(f"body=b'{'x' * 64}'… of 100 bytes)")
    with Client(shared.store) as client:
        sent = client.send_batch("shown", [b"a", b"y" * 1000], queue_id=0)
        assert repr(sent).startswith("<BatchResult: 2 messages of shown, stored at 20")
        pulled = client.pull("shown", 0, 0)
        assert repr(pulled) == "<PullResult FOUND: 2 messages, next_offset=2, min_offset=0, max_offset=2>"
        assert "body=b'a', " in repr(pulled.messages[0])
        assert f"body=b'{'y' * 64}'… of 1,000 bytes" in repr(pulled.messages[1])
        columns = client.pull_arrow("shown", 0, 0, columns=["tag"])
        assert repr(columns).startswith("<ArrowPullResult FOUND: 2 messages, columns tag; next_offset=2")
