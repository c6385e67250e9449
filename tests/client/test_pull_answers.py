"""A pull's answer becomes a PullResult, of every status, in few steps."""

from __future__ import annotations

import msgspec
import pytest

from mqproc.client.requests import arrow_parser, pull, pull_request, unread_pull
from mqproc.errors import CorruptStoreError, ProtocolError
from mqproc.filters.selection import chosen
from mqproc.layout.record_codec import decode_records
from mqproc.types import PullResult, PullStatus
from mqproc.wire.operations import PullAnswer, PullRequest
from tests.client.conftest import steps_of
from tests.support.records import encode_record

REQUEST = pull_request("orders", 0, 5, 32, 1 << 20, chosen("a || b", None), 2.5)
RECORD = encode_record(topic="orders", body=b"body", queue_offset=5)


def parsed(answer: PullAnswer, records: bytes = b"") -> PullResult:
    return pull(REQUEST).parse(memoryview(msgspec.msgpack.encode(answer)), memoryview(records))


def test_pull_call_has_the_request_and_wait() -> None:
    call = pull(REQUEST)
    assert msgspec.msgpack.decode(call.options, type=PullRequest) == REQUEST
    assert (call.role, call.repeatable, call.wait_s, call.oneway, call.hand_back) == ("query", True, 2.5, False, None)


@pytest.mark.parametrize("status", PullStatus)
def test_pull_answer_has_every_status(status: PullStatus) -> None:
    found = parsed(PullAnswer(status, 6, 1, 9, 2, "why"), RECORD + RECORD)
    assert found == PullResult(status, decode_records(RECORD + RECORD), 6, 1, 9, "why")
    assert type(found.status) is PullStatus
    assert parsed(PullAnswer(status, 6, 1, 9)) == PullResult(status, [], 6, 1, 9)


def test_pull_answer_malformed_raises_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="answer to PULL cannot be read"):
        pull(REQUEST).parse(memoryview(b"\xc1"), memoryview(b""))
    with pytest.raises(CorruptStoreError, match="no record at byte"):
        parsed(PullAnswer("FOUND", 6, 1, 9, 1), RECORD[:-1])


def test_a_status_of_another_version_is_refused_in_every_shape() -> None:
    """A status of another version raises ProtocolError, not ValueError."""
    answer = PullAnswer("NEVER_HEARD_OF", 6, 1, 9)
    with pytest.raises(ProtocolError, match="has the status 'NEVER_HEARD_OF', which this version does not know"):
        parsed(answer)
    for parse in unread_pull, arrow_parser(["body"]):
        with pytest.raises(ProtocolError, match="NEVER_HEARD_OF"):
            parse(answer, memoryview(b""))


@pytest.mark.parametrize("records", [b"", RECORD, RECORD * 3])
def test_an_answer_takes_few_steps(records: bytes) -> None:
    call, options, payload = pull(REQUEST), msgspec.msgpack.encode(PullAnswer("FOUND", 6, 1, 9)), memoryview(records)
    found, steps = steps_of(lambda: call.parse(memoryview(options), payload))
    assert len(found.messages) == len(records) // len(RECORD)
    assert len(steps) <= 4 + 3 * len(found.messages), steps
