"""RocketMQ 5.5's word of the checkpoint names the newest durable record of a queue."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc.io.store_io import StoreIO
from mqproc.layout import checkpoint
from mqproc.layout.record import SYS_FLAG_PREPARED
from mqproc.store.durable_marks import read_checkpoint
from tests.support.group import Group
from tests.support.store_builders import TaggedStore, write_at
from tests.support.store_checks import recover


def word_of(root: Path) -> int:
    return read_checkpoint(StoreIO(), root / "checkpoint").logics_physical_offset


def set_word(root: Path, value: int) -> None:
    write_at(root / "checkpoint", checkpoint.LOGICS_PHYSICAL_OFFSET, struct.pack(">q", value))


@pytest.mark.parametrize(("tags", "word"), [(True, 0), (True, 50), (False, 50)])
def test_recovery_sets_the_word_to_the_last_queued_record(tmp_path: Path, tags: bool, word: int) -> None:
    built = TaggedStore(tmp_path / "store").add(300, tags=tags)
    # A half message belongs to no queue.
    built.append("orders", [b"half"], sys_flag=SYS_FLAG_PREPARED)
    root = built.close_as_rocketmq()
    set_word(root, word)
    recover(root, built.options, clean=True)
    assert word_of(root) == built.offsets[-1]


def test_recovery_lowers_a_word_beyond_the_log(tmp_path: Path) -> None:
    built = TaggedStore(tmp_path / "store").add(300, tags=True)
    root = built.close_as_rocketmq()
    set_word(root, 1 << 40)
    recover(root, built.options, clean=False)
    assert word_of(root) == built.offsets[-1]


def test_recovery_of_a_store_without_the_word_leaves_it(tmp_path: Path) -> None:
    built = TaggedStore(tmp_path / "store").add(300, tags=False)
    root = built.close_as_rocketmq()
    recover(root, built.options, clean=True)
    assert word_of(root) == 0


def test_checkpoint_of_another_length_keeps_the_word(tmp_path: Path) -> None:
    built = TaggedStore(tmp_path / "store").add(300, tags=False)
    root = built.close_as_rocketmq()
    set_word(root, built.offsets[10])
    (root / "checkpoint").write_bytes((root / "checkpoint").read_bytes()[:48])
    recover(root, built.options, clean=True)
    assert word_of(root) == built.offsets[-1]


@pytest.mark.parametrize("tags", [True, False])
def test_group_moves_the_word_with_the_queues_mark(make_group: Callable[..., Group], tags: bool) -> None:
    group = make_group(message_index_tags=tags)
    with group.client() as client:
        sent = [client.send("orders", b"%d" % number, tag="paid") for number in range(20)]
    group.wait_dispatched()
    assert group.stop() == 0
    assert word_of(group.store) == (sent[-1].physical_offset if tags else 0)
