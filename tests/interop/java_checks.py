"""What RocketMQ told, against what was sent and what our reader finds."""

from __future__ import annotations

import base64
import ipaddress

from mqproc.message import StoredMessage
from tests.interop.java_stores import Sent
from tests.interop.java_story import Story
from tests.interop.questions import fields_of
from tests.interop.rocketmq import Dump, Line


def assert_told(dump: Dump, sent: dict[int, Sent]) -> None:
    """RocketMQ's log holds the messages, its queues those that have a place in one."""
    for offset, each in sent.items():
        line = dump.records[offset]
        properties = line["properties"]
        found = Sent(
            line["topic"],
            line["queueId"],
            line["queueOffset"],
            base64.b64decode(line["body"]),
            properties.get("TAGS", ""),
            tuple(properties.get("KEYS", "").split()),
            each.queued,
        )
        assert found == each
        assert (_unit_at(dump, each) == offset) is each.queued, each


def _unit_at(dump: Dump, sent: Sent) -> int | None:
    """The place in the log that RocketMQ's queue has for a message; None where its queue has none."""
    queue = dump.queues.get((sent.topic, sent.queue_id), {"minOffset": 0, "units": []})
    place = sent.queue_offset - queue["minOffset"]
    return queue["units"][place][0] if 0 <= place < len(queue["units"]) else None


def assert_delivered(story: Story, behind: dict[tuple[str, int], list[StoredMessage]]) -> None:
    """Behind what RocketMQ wrote lie the messages whose time had come, each once and where it was to go."""
    early, late = (story.dumps["second"].parked(moment_ms) for moment_ms in story.served_ms)
    origins: list[int] = []
    for queue, messages in behind.items():
        for message in messages:
            line = late[message.prepared_transaction_offset]
            properties = line["properties"]
            assert queue == (properties["REAL_TOPIC"], int(properties["REAL_QID"]))
            assert as_line(message)["body"] == line["body"]
            origins.append(line["offset"])
    assert len(set(origins)) == len(origins)
    assert early.keys() <= set(origins)
    assert early, "no message of this store was due"


def as_line(message: StoredMessage) -> Line:
    """Our message with the names and forms of StoreDump.java."""
    return {
        **fields_of(message),
        "offset": message.physical_offset,
        "physicalOffset": message.physical_offset,
        "size": message.size,
        "messageId": message.message_id,
        "bornHost": _host(message.born_host),
        "storeHost": _host(message.store_host),
        "bodyCrc": message.body_crc,
        "body": base64.b64encode(message.body).decode(),
    }


def _host(text: str) -> str:
    address, _, port = text.rpartition(":")
    return f"{ipaddress.ip_address(address.strip('[]')).packed.hex()}:{port}"
