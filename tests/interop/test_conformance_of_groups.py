"""A group of processes on RocketMQ's stores: recovery, reading, sending and stopping.

One store of each kind. Every recorded answer is compared with the running group's files, pulls also with its query
role; then a message is sent to a queue of RocketMQ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from mqproc import Client, Message, StoreReader
from mqproc.store.topics import RESERVED_TOPICS
from tests.golden.fixtures import Directory, all_directories, fixtures_folder, options_of
from tests.interop.conformance import Comparison
from tests.interop.golden_store import PULL_BYTES, Answer, Intact, Store, ask
from tests.support.group import Group

STORES = all_directories(fixtures_folder())
SIZES = (
    "mapped_file_size_commit_log",
    "mapped_file_size_consume_queue",
    "max_hash_slot_num",
    "max_index_num",
    "max_message_size",
)
# The stores are older than any retention time; their open transactions are not checked.
KEEP_ALL = {
    "file_reserved_time": 1 << 20,
    "clean_file_forcibly_enable": False,
    "transaction_check_interval": 86_400_000,
}
MakeGroup = Callable[..., Group]


def is_closed(store: Directory, root: Path) -> bool:
    return not store.damaged and store.closed


def is_a_brokers(store: Directory, root: Path) -> bool:
    return not store.damaged and (root / "config" / "topics.json").exists()


def is_killed(store: Directory, root: Path) -> bool:
    return not store.damaged and (root / "abort").exists()


def is_refused(store: Directory, root: Path) -> bool:
    return store.damaged and not store.expected["loadReturned"]


def has_a_hole(store: Directory, root: Path) -> bool:
    """True if damaged records have intact ones before and after them."""
    intact = Intact(store, root) if store.damaged else None
    return intact is not None and any(
        min(intact.at, default=0) < place < max(intact.at, default=0) for place in intact.lost
    )


def first_of(kind: Callable[[Directory, Path], bool], folder: Path) -> tuple[Directory, Path]:
    """The first store of a kind, unpacked."""
    for number, store in enumerate(STORES):
        root = store.unpack(folder / str(number))
        if kind(store, root):
            return store, root
    pytest.skip(f"no store here {kind.__name__.replace('_', ' ')}")


def pulls_over_the_wire(client: Client, comparison: Comparison, answers: list[Answer]) -> None:
    """The query role's pulls equal those from the files."""
    for question in answers:
        expression = question.get("filter", "*")
        # A client treats a filter of blanks as no filter.
        if question["op"] != "getMessage" or expression.isspace():
            continue
        pulled = client.pull(
            question["topic"],
            question["queueId"],
            question["offset"],
            question["maxMsgNums"],
            tags=expression,
            max_bytes=question.get("maxTotalMsgSize", PULL_BYTES),
            rocketmq_limits=True,
        )
        found = {
            "status": pulled.status.value,
            "nextBeginOffset": pulled.next_offset,
            "minOffset": pulled.min_offset,
            "maxOffset": pulled.max_offset,
            "bufferTotalSize": sum(message.size for message in pulled.messages),
            "queueOffsets": [message.queue_offset for message in pulled.messages],
            "phyOffsets": [message.physical_offset for message in pulled.messages],
        }
        comparison.demand(f"pull {question}", ask(comparison.reading, question), found)


def send_to_an_old_queue(client: Client, comparison: Comparison) -> None:
    """Send a message; it follows RocketMQ's last one in the log and in its queue."""
    end = comparison.reading.records.visible().end
    queue = next(
        queue
        for queue in client.queues()
        if queue.max_offset > 0 and not queue.topic.startswith("%") and queue.topic not in RESERVED_TOPICS
    )
    sent = client.send(Message(queue.topic, b"behind the old ones", keys=["after"], queue_id=queue.queue_id))
    assert sent.physical_offset >= end
    assert sent.queue_offset == queue.max_offset
    client.wait_dispatched()
    assert client.get(sent.message_id).body == b"behind the old ones"
    assert [message.message_id for message in client.by_key(queue.topic, "after")] == [sent.message_id]


@pytest.mark.parametrize(
    "kind", [is_closed, is_a_brokers, is_killed, is_refused, has_a_hole], ids=lambda kind: kind.__name__
)
def test_group_serves_rocketmqs_store(
    kind: Callable[[Directory, Path], bool], tmp_path: Path, make_group: MakeGroup
) -> None:
    store, root = first_of(kind, tmp_path)
    expected = store.expected
    options = dataclasses.asdict(options_of(expected))
    intact = Intact(store, root)
    group = make_group(str(root.relative_to(tmp_path)), **{name: options[name] for name in SIZES}, **KEEP_ALL)
    group.wait_dispatched()
    with ExitStack() as stack:
        reader = stack.enter_context(StoreReader(root))
        assert reader.running
        comparison = Comparison(Store(store, reader.reading, intact, stack))
        answers = (expected if expected["loadReturned"] else store.undamaged)["answers"]
        comparison.answers(answers)
        comparison.readable()
        with group.client() as client:
            pulls_over_the_wire(client, comparison, answers)
            assert not comparison.outcome.report()
            send_to_an_old_queue(client, comparison)
    assert group.stop() == 0
    assert not group.paths.abort.exists()
