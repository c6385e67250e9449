"""The 35 bad inputs and their answers, over real sockets and files of real groups."""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mqproc.errors import FilterSyntaxError
from mqproc.layout.control import QUERY, WRITER
from mqproc.layout.frame import HEADER, MAGIC, VERSION
from mqproc.supervisor.store_folder import CONTROL_SOCKET
from mqproc.types import Message, TagFilter
from mqproc.wire.frames import NO_OPTIONS, encode_options
from mqproc.wire.operations import (
    EARLIEST,
    AppendRequest,
    ByKeyRequest,
    ByTagRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    FrameOptions,
    GetRequest,
    GroupCommitRequest,
    GroupNackRequest,
    GroupReceiveRequest,
    Operation,
    PullRequest,
)
from tests.bad_input import cases
from tests.bad_input.cases import IS_ROOT, Answer, RawClient, Row, Scene, check

# Requests that a role refuses: raw bytes, or a frame with invalid options

Request = tuple[int, FrameOptions | bytes, bytes]


def header(
    operation: int = 16,
    *,
    magic: int = MAGIC,
    version: int = VERSION,
    options: int = 0,
    zero: int = 0,
    payload: int = 0,
) -> bytes:
    """A valid frame header with these changes."""
    return HEADER.pack(magic, version, operation, 1, options, zero, payload)


def append(topic: str = "known", body: bytes = b"body", columns: bytes = b"", **changes: Any) -> Request:
    """A frame of one message as a client sends it, with these changes."""
    given: dict[str, Any] = {"topic": topic, "count": 1, "bodies_bytes": len(body)} | changes
    return Operation.APPEND, AppendRequest(**given), struct.pack("<I", len(body)) + body + columns


def append_properties(data: bytes) -> Request:
    """A frame of one message with this complete property string."""
    return append(columns=struct.pack("<H", len(data) & 0xFFFF) + data, properties_bytes=len(data))


def append_sharded(key: bytes, **changes: Any) -> Request:
    """A frame of one message with a column of sharding keys."""
    given: dict[str, Any] = {"columns": struct.pack("<H", len(key)) + key, "sharding_bytes": len(key)}
    return append(**(given | changes))


def cut(number: int, name: str, code: str, says: str, data: bytes) -> Row:
    """Raw bytes, refused with the connection closed."""

    def does(scene: Scene) -> Answer:
        return _told(scene, WRITER, data)

    return Row(number, name, does, code, says, closes=True, refused_by=WRITER)


def refused(number: int, name: str, code: str, says: str, data: bytes | Request, role: str = WRITER) -> Row:
    """A frame, or its parts, refused on a connection that stays open."""

    def does(scene: Scene) -> Answer:
        return _told(scene, role, data)

    return Row(number, name, does, code, says, refused_by=role)


def question(number: int, name: str, code: str, says: str, operation: Operation, options: FrameOptions | bytes) -> Row:
    """A request that the query role refuses."""
    return refused(number, name, code, says, (operation, options, b""), QUERY)


def _told(scene: Scene, role: str, data: bytes | Request) -> Answer:
    with RawClient(scene.group.paths.socket(role)) as client:
        if isinstance(data, bytes):
            client.send(data)
        else:
            client.request(*data)
        error = client.refusal()
        at = f"; position {error.position}" if isinstance(error, FilterSyntaxError) else ""
        return Answer(error.code, f"{error}{at}", closed=not client.serves())


MIB = 1 << 20
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
BAD_SQL = {"a = = 1": 4, "a = 'b": 4, "a = 1 AND": 9, "(a = 1": 6, "a = 1)": 5, "a BETWEEN 1": 11, "a # 1": 2, "1": 0}
TOO_LONG = b"name\x01" + b"v" * 32_763 + b"\x02"


def create(topic: str, queues: int) -> tuple[Operation, CreateTopicRequest, bytes]:
    return Operation.CREATE_TOPIC, CreateTopicRequest(topic, queues), b""


def by_key(key: str, begin_ms: int = 0, end_ms: int = 1 << 62, most: int = 64) -> ByKeyRequest:
    return ByKeyRequest("known", key, begin_ms, end_ms, most)


def pull(**changes: Any) -> PullRequest:
    return PullRequest("known", 0, 0, **changes)


LONG_SQL = pull(sql="a = '" + "x" * 4_097 + "'")
LARGE = "frame of 69,206,048 bytes exceeds 67,108,864"
TABLE = [
    # Frames
    cut(1, "a frame above max_frame_bytes", "FRAME_TOO_LARGE", LARGE, header(payload=66 * MIB)),
    cut(1, "options above it", "FRAME_TOO_LARGE", "exceeds 67,108,864", header(options=(1 << 32) - 1)),
    cut(2, "a negative length", "FRAME_TOO_LARGE", "exceeds 67,108,864", header(payload=(1 << 64) - 1)),
    cut(2, "a reserved word", "BAD_FRAME", "0x7, not 0", header(zero=7)),
    cut(3, "another protocol", "UNSUPPORTED_VERSION", r"speaks 1\.\.1", b"GET / HTTP/1.1\r\n\r\n" * 2),
    cut(3, "another version", "UNSUPPORTED_VERSION", r"version 9; speaks 1\.\.1", header(version=9)),
    refused(4, "an unknown command", "UNKNOWN_COMMAND", "4711", header(4711)),
    refused(4, "an answer for a request", "UNKNOWN_COMMAND", "", header(0x8010)),
    refused(4, "another role's command", "UNKNOWN_COMMAND", "", (Operation.PULL, pull(), b"")),
    Row(5, "frames that end amid", cases.ends_amid, "", "^4 partial frames$", closes=True),
    Row(6, "a byte now and then", cases.trickles_in, "TIMEOUT", r"1\.5 s", closes=True, refused_by=WRITER),
    # Clients
    Row(7, "a client that reads nothing", cases.reads_nothing, "SLOW_CONSUMER", closes=True, refused_by=QUERY),
    Row(
        8,
        "a client too many",
        cases.one_connection_more,
        "TOO_MANY_CONNECTIONS",
        "24 connections are open",
        closes=True,
        refused_by=WRITER,
    ),
    Row(
        8,
        "100 more than 10,000",
        cases.ten_thousand,
        "TOO_MANY_CONNECTIONS",
        "10,000 connections are open",
        closes=True,
    ),
    *(
        Row(
            9,
            f"another user {what}",
            cases.another_user(role, data),
            "PERMISSION_DENIED",
            "user 65534 may not",
            closes=True,
            refused_by="" if role == CONTROL_SOCKET else role,
            root_only=True,
        )
        for what, role, data in (
            ("that sends nothing", WRITER, b""),
            ("with a whole message", WRITER, cases.frame()),
            ("with an invalid frame", WRITER, b"GET / HTTP/1.1\r\n\r\n"),
            ("at the query role", QUERY, header(Operation.PING)),
            ("at the supervisor", CONTROL_SOCKET, header(Operation.STOP_GROUP)),
        )
    ),
    # Messages
    *(refused(10, f"topic: {name}", "BAD_TOPIC", says, append(topic)) for name, (topic, says) in BAD_TOPICS.items()),
    *(
        refused(10, f"a new one: {name}", "BAD_TOPIC", says, create(topic, 1))
        for name, (topic, says) in BAD_TOPICS.items()
    ),
    *(refused(11, topic, "TOPIC_RESERVED", topic[:8], append(topic)) for topic in RESERVED),
    *(
        refused(11, f"{what} {topic}", "TOPIC_RESERVED", "made, widened or deleted", request)
        for topic in RESERVED
        if not topic.startswith("%")
        for what, request in (
            ("making", create(topic, 2)),
            ("deletion of", (Operation.DELETE_TOPIC, DeleteTopicRequest(topic), b"")),
        )
    ),
    refused(12, "a body too large", "MESSAGE_TOO_LARGE", "262,145.*262,144", append(body=b"b" * 262_145)),
    refused(12, "properties too large", "PROPERTIES_TOO_LARGE", "32,767", append_properties(TOO_LONG)),
    refused(12, "constant ones too large", "PROPERTIES_TOO_LARGE", "32,767", append(gap_after_keys=TOO_LONG)),
    refused(13, "a tag with a separator", "BAD_PROPERTY", "TAGS", append(tag="a\x02b")),
    refused(13, "a sharding key with one", "BAD_PROPERTY", "__SHARDINGKEY", append_sharded(b"a\x01b")),
    refused(13, "no end of a value", "BAD_PROPERTY", "not pairs", append(gap_after_keys=b"name\x01value")),
    refused(13, "no end of a name", "BAD_PROPERTY", "not pairs", append(gap_before_keys=b"name\x02")),
    Row(
        13,
        "a key with a space",
        lambda scene: cases.raised(scene, lambda client: client.send("known", b"x", keys=["order 7"])),
        "BAD_PROPERTY",
        "'order 7' holds the separator byte 0x20",
    ),
    Row(14, "an empty body", cases.sends_an_empty_body, "", "^body b''$", stores=True),
    refused(15, "a queue below 0", "NO_SUCH_QUEUE", "queue id -7; topic has 4 queues", append(queue_id=-7)),
    refused(15, "a queue at the count", "NO_SUCH_QUEUE", "queue id 4; topic has 4 queues", append(queue_id=4)),
    refused(16, "a queue too many", "TOO_MANY_QUEUES", "65 more queues exceed max_queues = 64", create("many", 65)),
    Row(
        16,
        "a topic too many",
        cases.queues_beyond_all,
        "TOO_MANY_QUEUES",
        r"\d more queues exceed max_queues = 32; 0 are left",
    ),
    # Reads
    Row(17, "a pull from a missing queue", cases.pulls_missing_queues, "NO_MATCHED_LOGIC_QUEUE"),
    refused(
        17,
        "deletion of a missing topic",
        "TOPIC_NOT_FOUND",
        "'missing'",
        (Operation.DELETE_TOPIC, DeleteTopicRequest("missing"), b""),
    ),
    Row(18, "a pull below 0", cases.pulls_at(-1), "OFFSET_TOO_SMALL", r"next 0 of \[0, 3\)"),
    Row(18, "a pull at the end", cases.pulls_at(3), "OFFSET_OVERFLOW_ONE", r"next 3 of \[0, 3\)"),
    Row(18, "a pull after the end", cases.pulls_at(4), "OFFSET_OVERFLOW_BADLY", r"next 3 of \[0, 3\)"),
    Row(18, "a pull far after the end", cases.pulls_at(1 << 62), "OFFSET_OVERFLOW_BADLY", r"next 3 of \[0, 3\)"),
    Row(19, "0 messages", cases.pulls_so_many(0), "FOUND", "^1 messages"),
    Row(19, "-5 messages", cases.pulls_so_many(-5), "FOUND", "^1 messages"),
    Row(19, "a billion messages", cases.pulls_so_many(10**9), "FOUND", "^3 messages"),
    Row(19, "0 by a frame", cases.pulls_by_frame(0), "FOUND", "^1 messages of 40"),
    Row(19, "fewer than any number", cases.pulls_by_frame(-(1 << 63)), "FOUND", "^1 messages of 40"),
    Row(19, "more than max_pull_bytes", cases.pulls_by_frame(10**9), "FOUND", "^20 messages of 40"),
    Row(19, "more than any number", cases.pulls_by_frame((1 << 64) - 1), "FOUND", "^20 messages of 40"),
    Row(19, "0 bytes", cases.pulls_by_frame(10**9, 0), "FOUND", "^1 messages of 40"),
    Row(20, "a commit beyond the end", cases.commits(4), "OFFSET_OVERFLOW", "4.*3", refused_by=QUERY),
    Row(21, "a commit of an earlier offset", cases.commits(1), "STALE_OFFSET", "committed offset 2", refused_by=QUERY),
    Row(21, "a reset to an earlier offset", cases.resets_back, "", "offset 0"),
    question(22, "an empty key", "BAD_REQUEST", "a topic and a key", Operation.BY_KEY, by_key("")),
    question(22, "an end before the begin", "BAD_REQUEST", r"\(5\).*\(9\)", Operation.BY_KEY, by_key("k", 9, 5)),
    question(22, "too many", "BAD_REQUEST", "65,537.*from 1 to 65,536", Operation.BY_KEY, by_key("k", most=65_537)),
    question(22, "none", "BAD_REQUEST", "max_messages = 0.*from 1 to", Operation.BY_KEY, by_key("k", most=0)),
    question(22, "an empty tag", "BAD_REQUEST", "a topic and a tag", Operation.BY_TAG, ByTagRequest("known", "")),
    question(22, "no index of tags", "BAD_REQUEST", "index_tags", Operation.BY_TAG, ByTagRequest("known", "t")),
    *(
        question(
            23, f"SQL: {sql}", "BAD_FILTER", rf"character {at + 1} .*; position {at}$", Operation.PULL, pull(sql=sql)
        )
        for sql, at in BAD_SQL.items()
    ),
    question(23, "much SQL", "BAD_FILTER", "of 4,103 bytes exceeds 4,096; position 4096", Operation.PULL, LONG_SQL),
    question(
        23,
        "long tags",
        "BAD_FILTER",
        "of 4,097 bytes exceeds 4,096; position 4096",
        Operation.PULL,
        pull(tags=["ä" * 2048, "t"]),
    ),
    question(
        23,
        "a simple consumer's",
        "BAD_FILTER",
        "character 5 .*; position 4$",
        Operation.GROUP_RECEIVE,
        GroupReceiveRequest("group", ["known"], 1, 1_000, 0, EARLIEST, 0, [], "a = = 1"),
    ),
    *(
        Row(
            23,
            f"tags: {what}",
            lambda scene, tags=tags: cases.raised(  # type: ignore[misc]
                scene, lambda client: client.pull("known", 0, 0, filter=TagFilter(tags))
            ),
            "BAD_FILTER",
            says,
        )
        for what, tags, says in (
            ("none of them", " || ", r"' \|\| ' names no tag"),
            ("a separator", "a || b\x02", r"character 7 \(the first is 1\): a tag cannot contain byte 0x02"),
            ("too long", "a || " + "b" * 4_092, "of 4,097 bytes exceeds 4,096"),
        )
    ),
    # Times
    refused(24, "a level below 0", "BAD_LEVEL", "-1 is out of range: from 0 to 18", append(delay_level=-1)),
    refused(24, "a level above the last", "BAD_LEVEL", "19 is out of range: from 0 to 18", append(delay_level=19)),
    refused(24, "a time below 0", "BAD_TIME", "-5", append(deliver_at_ms=-5)),
    refused(24, "a time too far off", "BAD_TIME", "timer_max_delay_sec = 259,200", append(deliver_at_ms=1 << 50)),
    question(
        24,
        "a retry level above the last",
        "BAD_LEVEL",
        "19 is above 18",
        Operation.GROUP_NACK,
        GroupNackRequest("group", [("known", 0, 0)], delay_level=19),
    ),
    # Failures
    Row(
        25,
        "a send to a full disk",
        cases.sends_to_a_full_disk,
        "DISK_FULL",
        "bytes must be free",
        refused_by=WRITER,
        root_only=True,
    ),
    Row(26, "a send after a failed sync", cases.sends_after_a_failed_sync, "STORE_READ_ONLY", "errno 5.*repair"),
    Row(
        27,
        "a send to a killed writer",
        cases.sends_to_a_killed_writer,
        "RETRY_LATER",
        "restarted.*come back in 100 ms",
        restarts={WRITER},
        stores=True,
    ),
    Row(28, "a read of damage", cases.reads_damage, "CORRUPT", r"\[\d+, \d+\)"),
    # Starts
    Row(29, "a second supervisor", cases.second_supervisor, "exit 7", r"in use by pid \d+ since 20"),
    Row(30, "commands without a store", cases.commands_without_a_store, "exit 5", "no such folder"),
    Row(30, "commands on a file", cases.commands_on(cases.a_file, cases.COMMANDS), "exit 3", "a_file: a file, not a"),
    Row(
        30,
        "commands on a folder that is no store",
        cases.commands_on(cases.an_empty_folder, cases.OF_STORES),
        "exit 3",
        "an_empty_folder: not a store: it has no folder commitlog",
    ),
    Row(30, "a start in a file's place", cases.starts_in_place_of_a_file, "exit 3", "not a folder"),
    Row(
        30, "a start where nothing may be written", cases.starts_where_nothing_may_be_written, "exit 3", "not writable"
    ),
    Row(30, "a start below no folder", cases.starts_below_a_missing_folder, "exit 3", "parent folder does not exist"),
    Row(30, "a start in an open folder", cases.starts_in_an_open_folder, "exit 3", "writable by everyone.*0777"),
    Row(30, "a start in another's", cases.starts_in_anothers_folder, "exit 3", "belongs to user 65534", root_only=True),
    Row(30, "a start in RocketMQ's folder", cases.starts_on_rocketmqs_open_folder, "", "^0755 0700$"),
    Row(31, "other sizes and strays", cases.starts_on_disorder, "", "65,536, .*1,048,576: 65,536 is used"),
    Row(31, "a symlink", cases.starts_on_a_symlink, "exit 3", "a symlink"),
    Row(31, "another's file", cases.starts_on_anothers_file, "exit 3", "belongs to user 65534", root_only=True),
    Row(32, "a strange control file", cases.starts_on_a_strange_control_file, "", "epoch 1$"),
    *(
        Row(32, f"a control file {what}", cases.starts_on_a_control_file(what), "", text)
        for what, text in cases.CONTROL_FILES.items()
    ),
    Row(32, "one that a group has lost", cases.second_supervisor_without_words, "exit 7", r"in use by pid \d+ since"),
    Row(33, "no good checkpoint", cases.starts_without_a_checkpoint, "", "738 records from the beginning 0"),
    Row(34, "garbled offsets", cases.starts_on_garbled_offsets, "", "read with a remark.*truncated"),
    Row(
        35,
        "a start with files of no pages",
        cases.starts_with("mapped_file_size_commit_log=5000"),
        "exit 8",
        "= 5,000 is out of range: from 4,096 to 2,147,483,648 bytes, in whole pages of 4,096",
    ),
    Row(
        35,
        "files of 0 bytes",
        cases.checks("mapped_file_size_commit_log=0"),
        "exit 8",
        "= 0 is out of range: from 4,096 to 2,147,483,648 bytes",
    ),
    Row(
        35,
        "files above 2 GiB",
        cases.checks("mapped_file_size_commit_log=3GiB"),
        "exit 8",
        "= 3,221,225,472 is out of range: from 4,096 to 2,147,483,648 bytes",
    ),
]
APPEND_OPTIONS, APPEND_PAYLOAD = append()[1:]
TAGGED_OPTIONS = append(tag="tagged")[1]


def encoded(options: bytes) -> tuple[int, bytes, bytes]:
    return Operation.APPEND, options, APPEND_PAYLOAD


def bad_message(name: str, says: str, **changes: Any) -> Row:
    return refused(0, name, "BAD_MESSAGE", says, append(**changes))


LENGTHS_BEYOND = AppendRequest("known", 1, bodies_bytes=4)
TWO_KEYS = AppendRequest("known", 2, bodies_bytes=2, sharding_bytes=2, delay_level=1)


def bad_messages(name: str, says: str, *messages: Any, count: int = 2, rest: bytes = b"") -> Row:
    """A frame of messages in MessagePack."""
    data = msgspec.msgpack.encode([Message("known", b"body"), *messages]) + rest
    return refused(0, name, "BAD_MESSAGE", says, (Operation.APPEND_MESSAGES, AppendRequest("known", count), data))


MORE = [
    # Options
    refused(0, "no options", "BAD_REQUEST", "options of APPEND", encoded(NO_OPTIONS)),
    refused(0, "options that are no MessagePack", "BAD_REQUEST", "options of APPEND", encoded(b"\xc1\xc1\xc1")),
    refused(0, "options of other types", "BAD_REQUEST", "options of APPEND", encoded(encode_options(GetRequest("x")))),
    refused(
        0,
        "text that is no UTF-8",
        "BAD_REQUEST",
        "options of APPEND",
        encoded(encode_options(APPEND_OPTIONS).replace(b"known", b"kn\xff\xfew")),
    ),
    refused(
        0,
        "text with half a surrogate pair",
        "BAD_REQUEST",
        "options of APPEND",
        encoded(encode_options(TAGGED_OPTIONS).replace(b"tagged", b"\xed\xa0\x80\xed\xb0\x80")),
    ),
    # Topics
    refused(0, "a retry topic too long", "BAD_TOPIC", "256 bytes exceeds 255", create("%RETRY%" + "g" * 249, 1)),
    refused(0, "a topic without queues", "BAD_REQUEST", "0", create("none", 0)),
    # Messages
    refused(0, "a property without a name", "BAD_PROPERTY", "not pairs", append(gap_before_tag=b"\x01value\x02")),
    refused(0, "an invalid unique id", "BAD_PROPERTY", "'zz", append(unique_prefix="z" * 28)),
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
    bad_message("an invalid host", "3 bytes", born_host=b"abc"),
    bad_message("a column reserved for roles", "", has_prepared=True, columns=b"\0" * 8),
    bad_messages("messages of another topic", "message 1: topic", Message("other", b"")),
    bad_messages("a number instead of a message", "message 1: no array", 7),
    bad_messages("messages short of the count", "no array", Message("known", b""), count=3),
    bad_messages("messages and further bytes", "further bytes", Message("known", b""), rest=b"\0"),
    bad_messages("a body beyond the payload", "message 1: body", msgspec.Raw(b"\x9c\xa5known\xc6\xff\xff\xff\xff")),
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
    question(0, "an invalid id", "BAD_REQUEST", "65536 characters", Operation.GET, GetRequest("a" * 65_536)),
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


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    # Outside of pytest's folder, which other users cannot enter.
    with tempfile.TemporaryDirectory(prefix="mqproc-bad-input-") as folder:
        found = Scene(Path(folder))
        try:
            yield found.start()
        finally:
            found.close()


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_bad_input_gets_its_answer_and_changes_nothing_else(scene: Scene, row: Row) -> None:
    if row.root_only and not IS_ROOT:
        pytest.skip("needs root")
    check(scene, row)


@pytest.mark.parametrize("row", MORE, ids=lambda row: row.name)
def test_invalid_request_is_refused(scene: Scene, row: Row) -> None:
    check(scene, row)


def test_readme_table_matches_test_table() -> None:
    """The table has each number once, in order, and every code that the rows expect."""
    lines = (Path(__file__).parent / "README.md").read_text().splitlines()
    table = {int(line.split("|")[1]): line for line in lines if re.match(r"\| \d", line)}
    assert list(table) == list(range(1, 36)) == sorted({row.number for row in TABLE})
    missing = [str(row) for row in TABLE if row.code not in table[row.number]]
    assert not missing
    # Rows that close the connection are marked.
    assert {number for number, line in table.items() if "✂" in line} == {row.number for row in TABLE if row.closes}
