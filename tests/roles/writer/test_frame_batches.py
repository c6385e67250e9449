"""Batches of append frames through a writer on a socket equal single frames."""

from __future__ import annotations

import dataclasses
import itertools
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqproc.client.batch import Batch
from mqproc.client.requests import Call
from mqproc.client.send_requests import send, send_batch, send_group, send_oneway
from mqproc.kernels import append_run
from mqproc.layout import control as words_of
from mqproc.layout.frame import ANSWER, REFUSAL
from mqproc.store.commitlog.append_templates import ANSWERS_BYTES
from mqproc.types import Message
from mqproc.wire.operations import AppendRequest, CreateTopicRequest, DeleteTopicRequest, Operation
from tests.roles.rigs import (
    BODY_MAX,
    Left,
    MakeRig,
    WriterRig,
    append_bytes,
    columns,
    error_of,
    frame_bytes,
    queue_ids,
    several,
    single,
)

SEGMENT = 1 << 20
ANSWERED = int(Operation.APPEND) | ANSWER
REFUSED = ANSWERED | REFUSAL
PREFIX = "0123456789AB" + "F" * 16


@dataclasses.dataclass(frozen=True)
class Frame:
    """A generated append frame; `wrong` names its defect."""

    topic: str = "A"
    sizes: tuple[int, ...] = (4,)
    keys: bool = False
    tag: str = ""
    tags: bool = False
    whole: bool = False
    closed: bool = True
    """Whether whole strings of properties end the last one, as clients' do."""
    sharding: bool = False
    queue_id: int = -1
    flag: int = 0
    flags: bool = False
    born: bool = False
    unique: bool = True
    gap: bool = False
    oneway: bool = False
    batch: bool = False
    wrong: str = ""

    def encode(self, request_id: int) -> bytes:
        count = len(self.sizes)
        sizes = (*self.sizes[:-1], BODY_MAX + 1) if self.wrong == "body" else self.sizes
        bodies = b"".join(bytes([65 + (request_id + place) % 26]) * size for place, size in enumerate(sizes))
        payload = [struct.pack(f"<{count}I", *sizes), bodies]
        if self.wrong == "length":
            payload[0] = struct.pack(f"<{count}I", sizes[0] + 1, *sizes[1:])
        given_sizes: dict[str, Any] = {"bodies_bytes": len(bodies) + (self.wrong == "size")}

        def texts(name: str, texts: list[bytes]) -> None:
            joined = b"".join(texts)
            payload.extend((struct.pack(f"<{count}H", *map(len, texts)), joined))
            given_sizes[name] = len(joined)

        if self.keys:
            separator = b"\x01" if self.wrong == "separator" else b""
            texts("keys_bytes", [b"k%d" % place + separator for place in range(count)])
        if self.tags:
            texts("tags_bytes", [b"t" * (place % 3) for place in range(count)])
        if self.whole:
            end = b"\x02" if self.closed else b""
            texts("properties_bytes", [b"KEYS\x01w%d" % place + end for place in range(count)])
        if self.born:
            payload.append(struct.pack(f"<{count}q", *range(count)))
        if self.queue_id == -2:
            last = 99 if self.wrong == "queue" else 0
            payload.append(struct.pack(f"<{count}i", *([place % 2 for place in range(count - 1)] + [last])))
        if self.flags:
            payload.append(struct.pack(f"<{count}i", *range(-1, count - 1)))
        if self.sharding:
            texts("sharding_bytes", [b"s%d" % (place % 5) for place in range(count)])
        prefix = PREFIX.lower() if self.wrong == "prefix" else PREFIX
        request = AppendRequest(
            self.topic,
            count,
            99 if self.wrong == "queue" and self.queue_id >= 0 else self.queue_id,
            has_born=self.born,
            has_queues=self.queue_id == -2,
            has_flags=self.flags,
            tag=self.tag,
            unique_prefix=prefix if self.unique else "",
            unique_counter=request_id if self.unique else 0,
            born_timestamp_ms=1_700_000_000_000 + request_id,
            flag=self.flag,
            gap_before_tag=b"name\x01value\x02" if self.gap else b"",
            batch=self.batch,
            oneway=self.oneway,
            **given_sizes,
        )
        return append_bytes(request_id, request, *payload)


SIZES = st.one_of(
    st.just((4,)),
    st.lists(st.sampled_from([0, 1, 5, 300]), min_size=1, max_size=9).map(tuple),
    st.lists(st.sampled_from([7, BODY_MAX]), min_size=1, max_size=4).map(tuple),
)
SHAPES = st.builds(
    Frame,
    topic=st.sampled_from("ABC"),
    keys=st.booleans(),
    tag=st.sampled_from(["", "tag"]),
    tags=st.booleans(),
    whole=st.sampled_from([False, False, True]),
    closed=st.booleans(),
    sharding=st.sampled_from([False, False, True]),
    queue_id=st.sampled_from([-1, -1, 0, 3, -2]),
    flag=st.sampled_from([0, 5]),
    flags=st.booleans(),
    born=st.booleans(),
    unique=st.booleans(),
    gap=st.booleans(),
    oneway=st.sampled_from([False, False, True]),
    batch=st.sampled_from([False, False, False, True]),
)
WRONG = st.sampled_from(["", "", "", "", "", "", "size", "length", "separator", "body", "queue", "prefix"])


@st.composite
def streams(draw: st.DrawFn) -> list[Frame]:
    """Frames of a few templates, most of which repeat; some are invalid."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=4))
    frame = st.builds(
        lambda shape, sizes, wrong: dataclasses.replace(shape, sizes=sizes, wrong=wrong),
        st.sampled_from(shapes),
        SIZES,
        WRONG,
    )
    return draw(st.lists(frame, min_size=1, max_size=40))


Outcome = tuple[int, bytes, bytes]


def taken(root: Path, frames: list[Frame], cuts: list[int], *, runs: bool) -> tuple[Left, dict[int, list[Outcome]]]:
    """Outcomes of a stream that arrives in pieces; another client's frame comes last."""
    data = b"".join(frame.encode(request_id) for request_id, frame in enumerate(frames, 1))
    options = {"max_queues": 64, "default_topic_queue_nums": 4, "max_message_size": BODY_MAX}
    with WriterRig(root, runs=runs, segments=12, **options) as rig:
        client, last = rig.client(), rig.client()
        places = sorted({cut % len(data) for cut in cuts} | {0, len(data)})
        for start, stop in itertools.pairwise(places):
            client.send(data[start:stop], steps=1)
        client.wait_for(request_id for request_id, frame in enumerate(frames, 1) if not frame.oneway)
        client.send(single(len(frames) + 1, "end"))
        client.wait_for([len(frames) + 1])
        last.send(single(1, "end"))
        last.wait_for([1])
        answers = {
            request_id: [(answer.operation, answer.options, answer.payload) for answer in of]
            for request_id, of in client.answers.items()
        }
        return rig.left(), answers


@settings(max_examples=60)
@given(streams(), st.lists(st.integers(0, 1 << 22), max_size=6))
def test_frame_batches_equal_frames_appended_singly(frames: list[Frame], cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        left, answers = taken(Path(folder) / "runs", frames, cuts, runs=True)
        left_one_by_one, answers_one_by_one = taken(Path(folder) / "single", frames, cuts, runs=False)
    assert answers == answers_one_by_one
    assert {len(of) for of in answers.values()} == {1}
    assert left.next_offsets == left_one_by_one.next_offsets
    assert left.counts == left_one_by_one.counts
    assert left.log == left_one_by_one.log


def test_frame_batches_use_the_kernel_for_known_templates(make_rig: MakeRig) -> None:
    """Otherwise the other tests would also pass for a writer without templates."""
    rig = make_rig()
    client = rig.client()
    client.send(b"".join(single(number, "A") for number in range(1, 101)))
    client.wait_for(range(1, 101))
    assert rig.writer._templates.words[append_run.FRAMES] == 99


# Ends of segments, staging, answers


def compared(make_rig: MakeRig, data: bytes, request_ids: list[int], **options: object) -> WriterRig:
    """The rig that was sent `data`, whose files and answers equal those without batches."""
    rigs = [make_rig(runs=runs, **options) for runs in (True, False)]
    clients = [rig.client() for rig in rigs]
    for client in clients:
        client.send(data)
        client.wait_for(request_ids)
    assert clients[0].answers == clients[1].answers
    assert {len(of) for of in clients[0].answers.values()} == {1}
    assert rigs[0].left() == rigs[1].left()
    return rigs[0]


def test_frame_batch_continues_in_the_next_segment(make_rig: MakeRig) -> None:
    data = b"".join(single(number, "A", b"x" * 30_000) for number in range(1, 101))
    rig = compared(make_rig, data, list(range(1, 101)))
    assert rig.written > 2 * SEGMENT


def test_frame_batch_known_template_may_exceed_the_staging_buffer(make_rig: MakeRig) -> None:
    """And than a segment."""
    data = single(1, "A") + several(2, "A", [b"y" * 40_000] * 70, born_timestamp_ms=1) + single(3, "A")
    rig = compared(make_rig, data, [1, 2, 3])
    assert rig.written > 2 * SEGMENT


@pytest.mark.parametrize("counts", [(20_000,) * 6, (ANSWERS_BYTES // 20 + 1,), (10, ANSWERS_BYTES // 20 + 1, 30_000)])
def test_frame_batch_answers_beyond_the_socket_buffer_all_arrive(make_rig: MakeRig, counts: tuple[int, ...]) -> None:
    frames = [single(1, "A")]
    frames += [several(number, "A", [b""] * count) for number, count in enumerate(counts, 2)]
    data = b"".join([*frames, single(len(counts) + 2, "A")])
    compared(make_rig, data, list(range(1, len(counts) + 3)), segments=16)


def test_frame_batch_unread_answers_are_not_overwritten(make_rig: MakeRig) -> None:
    rig = make_rig(segments=16)
    client = rig.client()
    client.send(single(1, "A", queue_id=0))
    sent = 0
    for number in range(2, 42):
        client.send(several(number, "A", [b""] * 20_000, queue_id=0))
        while rig.step():
            pass
        sent += 20_000
        if rig.written > 14 * SEGMENT:
            break
    client.wait_for(range(1, number + 1))
    offsets = [columns(client.answers[place][0].payload)[1] for place in range(1, number + 1)]
    assert list(itertools.chain(*offsets)) == list(range(sent + 1))


# Topics


def test_frame_batch_after_widened_topic_uses_the_new_queues(make_rig: MakeRig) -> None:
    rig = make_rig(default_topic_queue_nums=2)
    client = rig.client()
    frames = [single(number, "A") for number in range(1, 5)]
    frames += [frame_bytes(Operation.CREATE_TOPIC, 5, CreateTopicRequest("A", 5))]
    frames += [single(number, "A") for number in range(6, 16)]
    client.send(b"".join(frames))
    client.wait_for(range(1, 16))
    numbers = [*range(1, 5), *range(6, 16)]
    assert [queue_ids(client, number) for number in numbers] == [
        [n] for n in (0, 1, 0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4)
    ]
    assert rig.next_offsets() == {("A", 0): 4, ("A", 1): 4, ("A", 2): 2, ("A", 3): 2, ("A", 4): 2}


def test_frame_batch_after_topic_deletion_recreates_it_at_queue_0(make_rig: MakeRig) -> None:
    rig = make_rig(default_topic_queue_nums=3)
    client = rig.client()
    frames = [single(number, "A") for number in range(1, 6)]
    frames += [frame_bytes(Operation.DELETE_TOPIC, 6, DeleteTopicRequest("A"))]
    frames += [single(number, "A") for number in range(7, 11)]
    client.send(b"".join(frames))
    client.wait_for(range(1, 11))
    answers = [columns(client.answers[number][0].payload)[1:] for number in (1, 2, 3, 4, 5, 7, 8, 9, 10)]
    assert [queue_id for _, (queue_id,) in answers] == [0, 1, 2, 0, 1, 0, 1, 2, 0]
    assert [offset for (offset,), _ in answers] == [0, 0, 0, 1, 1, 2, 2, 1, 3]


def test_frame_batch_known_template_never_reaches_a_deleted_topic(make_rig: MakeRig) -> None:
    rig = make_rig(auto_create_topic_enable=False)
    client = rig.client()
    frames = [frame_bytes(Operation.CREATE_TOPIC, 1, CreateTopicRequest("A", 2)), single(2, "A"), single(3, "A")]
    frames += [frame_bytes(Operation.DELETE_TOPIC, 4, DeleteTopicRequest("A")), single(5, "A"), single(6, "A")]
    client.send(b"".join(frames))
    client.wait_for(range(1, 7))
    assert [error_of(client, number) is None for number in range(1, 7)] == [True] * 4 + [False] * 2
    assert rig.counts()["appended_messages"] == 2


def test_topic_widened_by_a_role_during_a_step_keeps_all_offsets(make_rig: MakeRig) -> None:
    """Nothing is published in between: the state of evicted templates must not apply to others."""
    rig = make_rig(default_topic_queue_nums=1)
    client = rig.client()
    client.send(frame_bytes(Operation.CREATE_TOPIC, 1, CreateTopicRequest("B", 4)) + single(2, "A") + single(8, "W"))
    client.wait_for([1, 2, 8])
    request = AppendRequest("W", 1, queue_id=3, bodies_bytes=4)
    frames = [single(3, "A"), single(4, "A")]
    frames += [frame_bytes(Operation.APPEND_OWN, 5, request, b"\4\0\0\0body")]
    frames += [single(6, "B"), several(7, "B", [b"x"] * 8)]
    client.send(b"".join(frames))
    client.wait_for(range(3, 8))
    assert {queue: offset for queue, offset in rig.next_offsets().items() if queue[0] == "B"} == {
        ("B", 0): 3,
        ("B", 1): 2,
        ("B", 2): 2,
        ("B", 3): 2,
    }


def test_frame_batch_full_template_cache_repeats_no_offset(make_rig: MakeRig) -> None:
    rig = make_rig(default_topic_queue_nums=1)
    client = rig.client()
    client.send(frame_bytes(Operation.CREATE_TOPIC, 1, CreateTopicRequest("B", 4)))
    client.send(b"".join(single(flag + 1, "A", flag=flag) for flag in range(1, 4096)))
    client.wait_for([1, 4096])
    frames = [single(5000, "A", flag=4096), single(5001, "A", flag=1)]
    frames += [single(5002, "B"), several(5003, "B", [b"x"] * 8), single(5004, "B")]
    client.send(b"".join(frames))
    client.wait_for(range(5000, 5005))
    rig.succeed()
    after = rig.client()
    after.send(several(1, "B", [b"y"] * 4))
    after.wait_for([1])
    assert columns(after.answers[1][0].payload)[1] == [3, 3, 2, 2]


# Oneway, options, limits


def test_frame_batch_unawaited_frames_are_published_unanswered(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = rig.client()
    client.send(single(1, "A", oneway=True))
    rig.run_until(lambda: rig.counts()["appended_messages"] == 1)
    client.send(b"".join(single(number, "A", oneway=True) for number in range(2, 51)))
    rig.run_until(lambda: rig.counts()["appended_messages"] == 50)
    assert rig.words[words_of.TABLE_AT] == rig.written > 50 * 90
    assert sum(rig.next_offsets().values()) == 50
    client.send(single(51, "A"))
    client.wait_for([51])
    assert list(client.answers) == [51]


def test_frame_batch_answers_name_the_offsets_for_every_request_kind(make_rig: MakeRig) -> None:
    rig = make_rig()
    connection = rig.connect()
    batch = Batch("A", [b"a", b"b", b"c"], keys=["k1", "k2", "k3"])
    for _ in range(3):
        calls: list[Call[Any]] = [
            send(Message("A", b"one", keys=("k",))),
            send_group([Message("A", b"x"), Message("A", b"y")]),
        ]
        calls += [*send_batch(batch, 1 << 20), send_oneway(Message("A", b"gone"), 1 << 20)]
        assert [outcome.error for outcome in rig.outcomes(connection, calls)] == [None] * 3
    rig.run_until(lambda: rig.counts()["appended_messages"] == 21)
    assert sum(rig.next_offsets().values()) == 21


def test_frame_batch_new_body_limit_applies_to_known_templates(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = rig.client()
    client.send(single(1, "A", b"x" * 2000) + single(2, "A", b"x" * 2000))
    client.wait_for([1, 2])
    rig.writer.reload(dataclasses.replace(rig.options, max_message_size=1000))
    client.send(single(3, "A", b"x" * 2000) + single(4, "A", b"x" * 1000) + single(5, "A", b"x" * 1001))
    client.wait_for([3, 4, 5])
    rig.writer.reload(dataclasses.replace(rig.options, max_message_size=2_000_000))
    client.send(single(6, "A", b"x" * 2000) + single(7, "A", b"x" * 900_000))
    client.wait_for([6, 7])
    assert [error_of(client, number) is None for number in range(1, 8)] == [True, True, False, True, False, True, True]


def test_frame_batch_beyond_one_poll_is_continued_in_order(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.writer._server.limits = dataclasses.replace(rig.writer._server.limits, requests_per_poll=10)
    client = rig.client()
    client.send(b"".join(single(number, "A", queue_id=0) for number in range(1, 96)))
    messages = []
    while len(client.answers) < 95:
        before = rig.counts()["appended_messages"]
        rig.step()
        messages.append(rig.counts()["appended_messages"] - before)
        client.read()
    assert max(messages) == 10
    assert [columns(client.answers[number][0].payload)[1] for number in range(1, 96)] == [[n] for n in range(95)]


def test_frame_batch_client_disconnect_leaves_others_intact(make_rig: MakeRig) -> None:
    rig = make_rig()
    gone, staying = rig.client(), rig.client()
    staying.send(single(1, "A"))
    staying.wait_for([1])
    gone.send(b"".join(single(number, "A", b"x" * 100) for number in range(1, 1001)))
    gone.close()
    staying.send(b"".join(single(number, "A") for number in range(2, 102)))
    staying.wait_for(range(2, 102))
    rig.run_until(lambda: len(rig.writer._server.connections) == 1)
    assert rig.counts()["appended_messages"] == 1101
    assert sum(rig.next_offsets().values()) == 1101
