"""Compare a group's ConsumeQueues and index with a rebuild from the log; list transactions."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mqproc import Client, Message
from mqproc.client._sync.transactions import Transaction
from mqproc.client.transaction_requests import Handle
from mqproc.config.options import Options
from mqproc.io.store_io import StoreIO
from mqproc.ipc.words import Words
from mqproc.layout import control as words_of
from mqproc.layout import index_file as index_layout
from mqproc.paths import StorePaths
from mqproc.store.recovery.recovery import Recovery
from mqproc.types import StoredMessage
from tests.support.group import Group, wait_until


def rebuilt(group: Group) -> StorePaths:
    """A copy of the store's log and configuration, recovered."""
    copy = StorePaths(group.store.with_name(group.store.name + ".rebuilt"))
    shutil.rmtree(copy.root, ignore_errors=True)
    copy.root.mkdir()
    shutil.copytree(group.paths.commit_log, copy.commit_log, ignore=shutil.ignore_patterns(copy.guard.name))
    shutil.copytree(group.paths.config, copy.config)
    options = Options(**{name: value for name, value in group.options.items() if name != "flush_disk_type"})
    words = Words(bytearray(words_of.FILE_SIZE))
    Recovery(StoreIO(), copy, options, words, lambda line: None, clean=False).run()
    return copy


def assert_equals_rebuild(group: Group) -> None:
    """Compare ConsumeQueue files byte for byte, index files by header, slots and items.

    Index file names are compared by their order.
    """
    other = rebuilt(group)
    assert_same_files(queue_files(group.paths), queue_files(other))
    ours, theirs = index_files(group.paths), index_files(other)
    assert len(ours) == len(theirs)
    for one, two in zip(ours, theirs, strict=True):
        assert one.name == two.name
        assert np.array_equal(used_part(one, group), used_part(two, group)), one.name


def assert_same_files(ours: dict[str, bytes], theirs: dict[str, bytes]) -> None:
    """Compare byte for byte; report a difference by file and offset, not by contents."""
    alone = {name: len((ours | theirs)[name]) for name in sorted(ours.keys() ^ theirs.keys())}
    assert not alone, f"only in {'ours' if ours.keys() - theirs.keys() else 'the rebuilt ones'}: {alone}"
    different = {name: _first_difference(ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
    assert not different, f"different from these bytes on: {different}"


def _first_difference(one: bytes, two: bytes) -> int:
    pairs = zip(one, two, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def queue_files(paths: StorePaths) -> dict[str, bytes]:
    found = sorted(path for path in paths.consume_queue.rglob("*") if path.is_file())
    return {str(path.relative_to(paths.consume_queue)): path.read_bytes() for path in found}


def index_files(paths: StorePaths) -> list[Path]:
    return sorted(path for path in paths.index.iterdir())


def used_part(path: Path, group: Group) -> np.ndarray:
    """Header, slots and the items below the count."""
    data = np.fromfile(path, np.uint8)
    count = int.from_bytes(data[index_layout.ITEM_COUNT : index_layout.ITEM_COUNT + 4].tobytes(), "big")
    return data[: index_layout.item_offset(group.options["max_hash_slot_num"], max(1, count))]


# Transactions

GROUP = "billing"
FAST = {"transaction_timeout": 200, "transaction_check_interval": 200}


def messages_of(client: Client, topic: str) -> list[StoredMessage]:
    """All messages of a topic, after dispatch has reached the end of the log."""
    client.wait_dispatched()
    queues = [queue for queue in client.queues() if queue.topic == topic]
    return [each for queue in queues for each in client.pull(topic, queue.queue_id, 0, 4096).messages]


def bodies(client: Client, topic: str) -> list[bytes]:
    return sorted(each.body for each in messages_of(client, topic))


def handle_of(transaction: Transaction, **changes: Any) -> Handle:
    fields = {"group": GROUP, "topic": "", "transaction_id": transaction.transaction_id} | changes
    return Handle(physical_offset=transaction.sent.physical_offset, **fields)


def open_ids(client: Client) -> set[str]:
    return {each.transaction_id for each in client.transactions.open()}


def left_open(client: Client, group: str, message: Message, **settings: Any) -> Transaction:
    with client.transaction(group, message, **settings) as transaction:
        transaction.leave()
    return transaction


def all_ended(client: Client, group: str) -> None:
    wait_until(lambda: not client.transactions.open(group), 60, f"no open transaction of {group}")
