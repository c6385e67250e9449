"""Requests that a role refuses: which code, what the text names, whether the connection goes on, and that nothing is
stored. One table over the real sockets of a real group.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from mqproc.layout.control import QUERY, WRITER
from mqproc.wire.frame import HEADER, MAGIC, VERSION
from mqproc.wire.group_operations import GroupCommitRequest, GroupNackRequest
from mqproc.wire.operations import (
    AppendRequest,
    ByKeyRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    GetRequest,
    Operation,
    PullRequest,
)
from mqproc.wire.options import Options
from mqproc.wire.protocol import NO_OPTIONS, encode_options
from tests.bad_input.raw_client import RawClient, rejects
from tests.conftest import Group

MIB = 1 << 20
SEPARATED = re.compile(r"\d{1,3}(,\d{3})+")


def header(
    operation: int = 16,
    *,
    magic: int = MAGIC,
    version: int = VERSION,
    options: int = 0,
    zero: int = 0,
    payload: int = 0,
) -> bytes:
    return HEADER.pack(magic, version, operation, 1, options, zero, payload)


def append(topic: str = "known", body: bytes = b"body", columns: bytes = b"", **changes: Any) -> tuple[Options, bytes]:
    """A frame of one message, as a client would send it but for the changes."""
    given: dict[str, Any] = {"topic": topic, "count": 1, "bodies_bytes": len(body)} | changes
    return AppendRequest(**given), struct.pack("<I", len(body)) + body + columns


def append_properties(data: bytes) -> tuple[Options, bytes]:
    """A frame of one message with a whole property string."""
    return append(columns=struct.pack("<H", len(data) & 0xFFFF) + data, properties_bytes=len(data))


@dataclass(frozen=True)
class Bad:
    """One bad input. `data` are raw bytes; else `operation` and `request` make the frame."""

    name: str
    code: str
    says: str
    operation: int = Operation.APPEND
    request: tuple[Options | bytes, bytes] = (b"", b"")
    data: bytes = b""
    closes: bool = False
    role: str = WRITER


def append_is_refused(name: str, code: str, says: str, *args: Any, **changes: Any) -> Bad:
    return Bad(name, code, says, request=append(*args, **changes))


def query_is_refused(name: str, code: str, says: str, operation: Operation, options: Options | bytes) -> Bad:
    return Bad(name, code, says, operation, (options, b""), role=QUERY)


BAD_TOPICS = {
    "empty": ("", "empty"),
    "too long": ("t" * 128, "128 bytes exceeds 127"),
    "slash": ("a/b", "0x2F at 1"),
    "dots": ("..", "0x2E at 0"),
    "NUL": ("a\0", "0x00 at 1"),
    "space": ("a b", "0x20 at 1"),
    "not ASCII": ("ä", "0xC3 at 0"),
}
RESERVED = (
    "SCHEDULE_TOPIC_XXXX",
    "%RETRY%group",
    "%DLQ%group",
    "rmq_sys_wheel_timer",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    "rmq_sys_REVIVE_LOG_DefaultCluster",
)

CASES = [
    # Frames
    Bad(
        "a frame above max_frame_bytes",
        "FRAME_TOO_LARGE",
        "frame of 69,206,048 bytes exceeds 67,108,864",
        data=header(payload=66 * MIB),
        closes=True,
    ),
    Bad(
        "options above max_frame_bytes",
        "FRAME_TOO_LARGE",
        "exceeds 67,108,864",
        data=header(options=(1 << 32) - 1),
        closes=True,
    ),
    Bad("a negative length", "FRAME_TOO_LARGE", "exceeds 67,108,864", data=header(payload=(1 << 64) - 1), closes=True),
    Bad("a reserved word", "BAD_FRAME", "0x7, not 0", data=header(zero=7), closes=True),
    Bad("another protocol", "UNSUPPORTED_VERSION", "speaks 1..1", data=b"GET / HTTP/1.1\r\n\r\n" * 2, closes=True),
    Bad("another version", "UNSUPPORTED_VERSION", "version 9; speaks 1..1", data=header(version=9), closes=True),
    Bad("an unknown command", "UNKNOWN_COMMAND", "4711", data=header(4711)),
    Bad("an answer for a request", "UNKNOWN_COMMAND", "", data=header(0x8010)),
    Bad("a command of another role", "UNKNOWN_COMMAND", "", Operation.PULL, (PullRequest("known", 0, 0), b"")),
    Bad("no options", "BAD_REQUEST", "options of APPEND", request=(NO_OPTIONS, b"")),
    Bad("options that are no MessagePack", "BAD_REQUEST", "options of APPEND", request=(b"\xc1\xc1\xc1", b"")),
    Bad("options of other types", "BAD_REQUEST", "options of APPEND", request=(encode_options(GetRequest("x")), b"")),
    Bad(
        "text that is no UTF-8",
        "BAD_REQUEST",
        "options of APPEND",
        request=(encode_options(append()[0]).replace(b"known", b"kn\xff\xfew"), append()[1]),
    ),
    Bad(
        "text with half a surrogate pair",
        "BAD_REQUEST",
        "options of APPEND",
        request=(encode_options(append(tag="tagged")[0]).replace(b"tagged", b"\xed\xa0\x80\xed\xb0\x80"), append()[1]),
    ),
    # Topics
    Bad(
        "a retry topic too long",
        "BAD_TOPIC",
        "256 bytes exceeds 255",
        Operation.CREATE_TOPIC,
        (CreateTopicRequest("%RETRY%" + "g" * 249, 1), b""),
    ),
    *(append_is_refused(f"topic: {name}", "BAD_TOPIC", says, topic) for name, (topic, says) in BAD_TOPICS.items()),
    *(
        Bad(f"a new topic: {name}", "BAD_TOPIC", says, Operation.CREATE_TOPIC, (CreateTopicRequest(topic, 1), b""))
        for name, (topic, says) in BAD_TOPICS.items()
    ),
    *(append_is_refused(f"to {topic}", "TOPIC_RESERVED", topic[:8], topic) for topic in RESERVED),
    Bad(
        "deletion of an unknown topic",
        "TOPIC_NOT_FOUND",
        "'nobody'",
        Operation.DELETE_TOPIC,
        (DeleteTopicRequest("nobody"), b""),
    ),
    Bad("a topic without queues", "BAD_REQUEST", "0", Operation.CREATE_TOPIC, (CreateTopicRequest("none", 0), b"")),
    Bad(
        "a topic of too many queues",
        "TOO_MANY_QUEUES",
        "max_queues = 64",
        Operation.CREATE_TOPIC,
        (CreateTopicRequest("many", 65), b""),
    ),
    # Messages
    append_is_refused("a body above max_message_size", "MESSAGE_TOO_LARGE", "262,145.*262,144", body=b"b" * 262_145),
    Bad(
        "properties above RocketMQ's limit",
        "PROPERTIES_TOO_LARGE",
        "32,767",
        request=append_properties(b"name\x01" + b"v" * 32_763 + b"\x02"),
    ),
    append_is_refused(
        "constant properties above it",
        "PROPERTIES_TOO_LARGE",
        "32,767",
        gap_after_keys=b"name\x01" + b"v" * 32_763 + b"\x02",
    ),
    append_is_refused("a tag with a separator", "BAD_PROPERTY", "TAGS", tag="a\x02b"),
    append_is_refused("a property without a value's end", "BAD_PROPERTY", "", gap_after_keys=b"name\x01value"),
    append_is_refused("a property without a name's end", "BAD_PROPERTY", "", gap_before_keys=b"name\x02"),
    append_is_refused("a property without a name", "BAD_PROPERTY", "", gap_before_tag=b"\x01value\x02"),
    append_is_refused("a unique id that is none", "BAD_PROPERTY", "'zz", unique_prefix="z" * 28),
    append_is_refused("a unique id of other letters", "BAD_PROPERTY", "28 hex", unique_prefix="é" * 28),
    append_is_refused("a short unique id", "BAD_PROPERTY", "28", unique_prefix="A" * 27),
    append_is_refused("no messages", "BAD_MESSAGE", "count = 0", count=0),
    append_is_refused("a negative count", "BAD_MESSAGE", "count = -1", count=-1),
    append_is_refused("too many messages", "BAD_MESSAGE", "1,048,576", count=(1 << 20) + 1),
    append_is_refused("columns beyond the payload", "BAD_MESSAGE", "", bodies_bytes=1 << 40),
    append_is_refused("columns short of the payload", "BAD_MESSAGE", "the payload has", columns=b"rest"),
    append_is_refused("a column of negative size", "BAD_MESSAGE", "", keys_bytes=-7),
    Bad(
        "lengths beyond their column",
        "BAD_MESSAGE",
        "",
        request=(AppendRequest("known", 1, bodies_bytes=4), struct.pack("<I", 5) + b"body"),
    ),
    append_is_refused("a host that is none", "BAD_MESSAGE", "3 bytes", born_host=b"abc"),
    append_is_refused("what is for roles alone", "BAD_MESSAGE", "", has_prepared=True, columns=b"\0" * 8),
    # Queues
    append_is_refused("a queue below 0", "NO_SUCH_QUEUE", "queue id -7; topic has 4 queues", queue_id=-7),
    append_is_refused("a queue at the count", "NO_SUCH_QUEUE", "queue id 4; topic has 4 queues", queue_id=4),
    append_is_refused(
        "a queue column beyond it", "NO_SUCH_QUEUE", "4", queue_id=-2, has_queues=True, columns=struct.pack("<i", 99)
    ),
    append_is_refused(
        "a queue column below 0", "NO_SUCH_QUEUE", "4", queue_id=-2, has_queues=True, columns=struct.pack("<i", -1)
    ),
    append_is_refused("a queue column that is not there", "BAD_MESSAGE", "", queue_id=-2),
    # Times
    append_is_refused("a negative delay level", "BAD_LEVEL", "-1.*18", delay_level=-1),
    append_is_refused("a negative time", "BAD_LEVEL", "-5", deliver_at_ms=-5),
    append_is_refused("a time too far off", "BAD_LEVEL", "timer_max_delay_sec", deliver_at_ms=1 << 50),
    append_is_refused("a level and a time", "BAD_MESSAGE", "one time", delay_level=1, deliver_at_ms=1 << 41),
    query_is_refused(
        "a retry level above the last",
        "BAD_LEVEL",
        "19 is above 18",
        Operation.GROUP_NACK,
        GroupNackRequest("group", [("known", 0, 0)], delay_level=19),
    ),
    # Reads
    query_is_refused("an empty key", "BAD_REQUEST", "a topic and a key", Operation.BY_KEY, ByKeyRequest("known", "")),
    query_is_refused(
        "a range that ends before it begins",
        "BAD_REQUEST",
        r"\(5\).*\(9\)",
        Operation.BY_KEY,
        ByKeyRequest("known", "k", 9, 5),
    ),
    query_is_refused("an id that is none", "BAD_REQUEST", "65536 characters", Operation.GET, GetRequest("a" * 65_536)),
    query_is_refused(
        "a filter of two kinds",
        "BAD_REQUEST",
        "not by both",
        Operation.PULL,
        PullRequest("known", 0, 0, tags=["a"], sql="a = 1"),
    ),
    query_is_refused(
        "a filter that is no SQL",
        "BAD_FILTER",
        "character 4",
        Operation.PULL,
        PullRequest("known", 0, 0, sql="a = = 1"),
    ),
    query_is_refused(
        "tags above 4 KiB", "BAD_FILTER", "4,096", Operation.PULL, PullRequest("known", 0, 0, tags=["t" * 4097])
    ),
    query_is_refused(
        "SQL above 4 KiB",
        "BAD_FILTER",
        "4,096",
        Operation.PULL,
        PullRequest("known", 0, 0, sql="a = '" + "x" * 4096 + "'"),
    ),
    query_is_refused(
        "a commit of too many queues' kinds",
        "BAD_REQUEST",
        "",
        Operation.GROUP_COMMIT,
        GroupCommitRequest("", [("known", 0, -1, 0)]),
    ),
]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    started = Group(tmp_path_factory.mktemp("refusals") / "store", max_queues=64).start()
    with started.client() as client:
        client.create_topic("known", 4)
        client.send("known", b"first", queue_id=0)
        client.groups.change("group")
    yield started
    started.close()


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
def test_it_is_refused(group: Group, bad: Bad) -> None:
    written, before = group.words()["written"], rejects(group, bad.role)
    with RawClient(group.paths.socket(bad.role)) as client:
        if bad.data:
            client.send(bad.data)
        else:
            client.request(bad.operation, *bad.request)
        error = client.refusal()
        assert (error.code, bool(re.search(bad.says, str(error)))) == (bad.code, True), str(error)
        assert client.is_closed() if bad.closes else client.serves()
    after = rejects(group, bad.role)
    assert {code: after[code] - before[code] for code in after if after[code] != before[code]} == {bad.code: 1}
    assert group.words()["written"] == written
