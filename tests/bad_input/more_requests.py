"""Requests that a role refuses beside those of the table: options, columns and names that contradict each other."""

from __future__ import annotations

import struct
from typing import Any

from mqproc.wire.frames import NO_OPTIONS, encode_options
from mqproc.wire.operations import Operation
from mqproc.wire.operations.groups import GroupCommitRequest
from mqproc.wire.operations.log import AppendRequest, CreateTopicRequest, GetRequest, PullRequest
from tests.bad_input.requests import append, append_sharded, question, refused
from tests.bad_input.scene import Row

OPTIONS, PAYLOAD = append()[1:]
TAGGED = append(tag="tagged")[1]


def encoded(options: bytes) -> tuple[int, bytes, bytes]:
    return Operation.APPEND, options, PAYLOAD


def create(topic: str, queues: int) -> tuple[int, CreateTopicRequest, bytes]:
    return Operation.CREATE_TOPIC, CreateTopicRequest(topic, queues), b""


def bad_message(name: str, says: str, **changes: Any) -> Row:
    return refused(0, name, "BAD_MESSAGE", says, append(**changes))


LENGTHS_BEYOND = AppendRequest("known", 1, bodies_bytes=4)
TWO_KEYS = AppendRequest("known", 2, bodies_bytes=2, sharding_bytes=2, delay_level=1)
MORE = [
    # Options
    refused(0, "no options", "BAD_REQUEST", "options of APPEND", encoded(NO_OPTIONS)),
    refused(0, "options that are no MessagePack", "BAD_REQUEST", "options of APPEND", encoded(b"\xc1\xc1\xc1")),
    refused(0, "options of other types", "BAD_REQUEST", "options of APPEND", encoded(encode_options(GetRequest("x")))),
    refused(
        0,
        "text that is not UTF-8",
        "BAD_REQUEST",
        "options of APPEND",
        encoded(encode_options(OPTIONS).replace(b"known", b"kn\xff\xfew")),
    ),
    refused(
        0,
        "text with half a surrogate pair",
        "BAD_REQUEST",
        "options of APPEND",
        encoded(encode_options(TAGGED).replace(b"tagged", b"\xed\xa0\x80\xed\xb0\x80")),
    ),
    # Topics
    refused(0, "a retry topic too long", "BAD_TOPIC", "256 bytes exceeds 255", create("%RETRY%" + "g" * 249, 1)),
    refused(0, "a topic without queues", "BAD_REQUEST", "0", create("none", 0)),
    # Messages
    refused(0, "a property without a name", "BAD_PROPERTY", "not pairs", append(gap_before_tag=b"\x01value\x02")),
    refused(0, "a unique id that is none", "BAD_PROPERTY", "'zz", append(unique_prefix="z" * 28)),
    refused(0, "a unique id of other letters", "BAD_PROPERTY", "28 hex", append(unique_prefix="é" * 28)),
    refused(0, "a short unique id", "BAD_PROPERTY", "28", append(unique_prefix="A" * 27)),
    bad_message("no messages", "count = 0", count=0),
    bad_message("a negative count", "count = -1", count=-1),
    bad_message("too many messages", "1,048,576", count=(1 << 20) + 1),
    bad_message("columns beyond the payload", "", bodies_bytes=1 << 40),
    bad_message("columns short of the payload", "the payload has", columns=b"rest"),
    bad_message("a column of negative size", "", keys_bytes=-7),
    refused(
        0,
        "lengths beyond their column",
        "BAD_MESSAGE",
        "",
        (Operation.APPEND, LENGTHS_BEYOND, struct.pack("<I", 5) + b"body"),
    ),
    bad_message("a host that is none", "3 bytes", born_host=b"abc"),
    bad_message("what is for roles alone", "", has_prepared=True, columns=b"\0" * 8),
    # Queues
    refused(
        0,
        "a queue column beyond the count",
        "NO_SUCH_QUEUE",
        "4",
        append(queue_id=-2, has_queues=True, columns=struct.pack("<i", 99)),
    ),
    refused(
        0,
        "a queue column below 0",
        "NO_SUCH_QUEUE",
        "4",
        append(queue_id=-2, has_queues=True, columns=struct.pack("<i", -1)),
    ),
    bad_message("a queue column that is not there", "", queue_id=-2),
    refused(0, "a sharding key beside a queue", "BAD_MESSAGE", "not both", append_sharded(b"a", queue_id=1)),
    refused(
        0, "a sharding key without its bytes", "BAD_MESSAGE", "the payload has", append_sharded(b"a", sharding_bytes=9)
    ),
    refused(
        0,
        "a sharding key longer than its column",
        "BAD_MESSAGE",
        "lengths",
        append_sharded(b"a", columns=b"\x09\x00a"),
    ),
    bad_message("a sharding column of negative size", "", sharding_bytes=-3),
    refused(
        0,
        "two sharding keys in a frame that waits",
        "BAD_MESSAGE",
        "one sharding key",
        (Operation.APPEND, TWO_KEYS, struct.pack("<2I", 1, 1) + b"ab" + struct.pack("<2H", 1, 1) + b"ab"),
    ),
    bad_message("a level and a time", "use one of them", delay_level=1, deliver_at_ms=1 << 41),
    # Reads
    question(0, "an id that is none", "BAD_REQUEST", "65536 characters", Operation.GET, GetRequest("a" * 65_536)),
    question(
        0,
        "a filter of two kinds",
        "BAD_REQUEST",
        "not by both",
        Operation.PULL,
        PullRequest("known", 0, 0, tags=["a"], sql="a = 1"),
    ),
    question(
        0,
        "a commit for no group",
        "BAD_REQUEST",
        "",
        Operation.GROUP_COMMIT,
        GroupCommitRequest("", [("known", 0, -1, 0)]),
    ),
]
