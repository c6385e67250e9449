"""The append engine writes the same record bytes as RocketMQ for the same messages.

Each line of the fixture's manifest has the arguments of a `putMessage`. The same values go through mqproc's append
engine with the original store time and hosts; the CommitLog files must be equal byte for byte.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqproc.config.options import Options
from mqproc.errors import BadRequestError, MessageTooLargeError, PropertiesTooLargeError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control_words import Words
from mqproc.layout import control as words_of
from mqproc.layout.properties import encode
from mqproc.paths import StorePaths
from mqproc.store.commitlog.append import CommitLogAppender
from mqproc.store.commitlog.append_templates import AppendPlan, AppendTemplate, topic_fields
from mqproc.store.commitlog.flush import make_segment
from mqproc.store.commitlog.segments import LogSegments
from mqproc.store.consumequeue.table import QueueTable
from tests.golden.fixtures import Fixture, host_bytes, load_fixture

SEGMENT_SIZE = 65536


class GoldenWriter:
    """The append engine on an empty folder; creates a segment when one is full."""

    def __init__(self, root: Path) -> None:
        self.io = StoreIO()
        self.paths = StorePaths(root)
        for folder in (self.paths.commit_log, self.paths.own):
            self.io.make_folder(folder)
        self.table = QueueTable.create(self.io, self.paths.queues, 1024)
        self.segments = LogSegments(self.io, self.paths.commit_log, SEGMENT_SIZE)
        self.words = Words(bytearray(words_of.FILE_SIZE))
        self._make(0)
        options = Options(
            mapped_file_size_commit_log=SEGMENT_SIZE, max_message_size=32768, enabled_append_prop_crc=False
        )
        self.appender = CommitLogAppender(self.io, options, self.words, self.table, self.segments, bytes(8), self._make)

    def _make(self, start: int) -> None:
        if not self.segments.path(start).exists():
            make_segment(self.io, self.paths, start, SEGMENT_SIZE)

    def put(self, line: dict[str, Any], body: bytes) -> tuple[int, int]:
        """Append one message; return (physical offset, queue offset)."""
        self.appender.store_host = host_bytes(line["storeHost"])
        answer = self.appender.add(self._plan(line, body), line["result"].get("storeTimestamp", 0))
        self.appender.write_out()
        self.appender.publish()
        columns = answer[:16].view(np.int64)
        return int(columns[0]), int(columns[1])

    def _plan(self, line: dict[str, Any], body: bytes) -> AppendPlan:
        queue_id = line["queueId"]
        numbers = [self.table.create_queue(line["topic"], each) for each in range(queue_id + 1)]
        properties = (line["propertiesString"] or "").encode()
        payload = b"".join((len(body).to_bytes(4, "little"), body, len(properties).to_bytes(2, "little"), properties))
        at = 4 + len(body)
        magic, topic_block = topic_fields(line["topic"])
        template = AppendTemplate(
            magic=magic,
            topic_block=topic_block,
            queue_numbers=np.array(numbers, np.int64),
            fixed_queue=queue_id,
            parts=(b"", b"", b"", b""),
            born_host=host_bytes(line["bornHost"]),
            flag=line["flag"],
            sys_flag=line["sysFlagGiven"],
            reconsume_times=line["reconsumeTimes"],
            prepared_transaction_offset=line["preparedTransactionOffset"],
        )
        return AppendPlan(
            template,
            np.frombuffer(bytearray(payload), np.uint8),
            count=1,
            columns=(0, 4, -1, -1, -1, -1, at, at + 2, -1, -1, -1, -1, -1, -1),
            rotation=0,
            born_timestamp_ms=line["bornTimestamp"],
        )


def body_of(line: dict[str, Any], fixture: Fixture) -> bytes:
    """A message's body; long ones are only hashed in the manifest and read from the log."""
    if line["bodyLen"] == 0:
        return b""
    if line.get("bodyBase64"):
        return base64.b64decode(line["bodyBase64"])
    if line["result"].get("physicalOffset") is None or line["result"]["status"] != "PUT_OK":
        return bytes(line["bodyLen"])
    body = fixture.body_at(line["result"]["physicalOffset"])
    assert hashlib.sha256(body).hexdigest() == line["bodySha256"]
    return body


def test_append_writes_same_commit_log_as_rocketmq(tmp_path: Path) -> None:
    fixture = load_fixture("a_basic", tmp_path / "original")
    writer = GoldenWriter(tmp_path / "ours")
    stored = 0
    for line in fixture.manifest:
        body = body_of(line, fixture)
        status = line["result"]["status"]
        if status == "MESSAGE_ILLEGAL":
            with pytest.raises(MessageTooLargeError):
                writer.put(line, body)
            continue
        if status == "PROPERTIES_SIZE_EXCEEDED":
            # The column's length has 16 bits, so such a message does not fit into a frame.
            with pytest.raises((PropertiesTooLargeError, BadRequestError, OverflowError)):
                writer.put(line, body)
            continue
        assert writer.put(line, body) == (line["result"]["physicalOffset"], line["result"]["queueOffset"]), line["seq"]
        stored += 1
    assert stored == fixture.expected["recordCount"] > 700
    end = writer.words[words_of.WRITTEN]
    assert end == fixture.expected["maxPhyOffset"]
    for start in fixture.segment_starts(SEGMENT_SIZE, end):
        ours = writer.segments.path(start).read_bytes()
        theirs = (fixture.store / "commitlog" / f"{start:020d}").read_bytes()
        assert ours == theirs, f"segment {start}"


def test_append_writes_properties_in_rocketmqs_order() -> None:
    names = "KEYS TAGS UNIQ_KEY WAIT bb CLUSTER MSG_REGION TRACE_ON DELAY REAL_TOPIC REAL_QID".split()
    text = encode(dict.fromkeys(names, "v"))
    found = [pair.split("\x01")[0] for pair in text.split("\x02") if pair]
    expected = "MSG_REGION UNIQ_KEY CLUSTER DELAY TAGS bb KEYS WAIT TRACE_ON REAL_TOPIC REAL_QID"
    assert found == expected.split()
