"""RocketMQ 5.5 with `enableAcceleratedRecovery` continues a killed group's store."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc import Message
from mqproc.layout import checkpoint
from tests.golden.fixtures import KEPT, load_store, options_of, read_expected
from tests.interop.rocketmq import REFERENCE, Dump, RocketMq, golden_of
from tests.support.group import Group
from tests.support.store_builders import write_at

# The first test waits for the build.
pytestmark = pytest.mark.timeout(1000)

TOPIC = "Extended"
MESSAGES = 50


@pytest.mark.parametrize("word", [None, 0], ids=["as left by RocketMQ", "lost"])
def test_accelerated_recovery_after_a_kill_of_a_group(
    word: int | None, tmp_path: Path, make_group: Callable[..., Group]
) -> None:
    """RocketMQ refuses a store without the word that says where its recovery begins."""
    golden = golden_of(REFERENCE)
    expected, store = read_expected("a_basic", golden), load_store("a_basic", tmp_path, golden)
    if word is not None:
        write_at(store / "checkpoint", checkpoint.LOGICS_PHYSICAL_OFFSET, struct.pack(">q", word))
    size = options_of(expected).mapped_file_size_commit_log
    group = make_group("store", **KEPT, mapped_file_size_commit_log=size)
    with group.client() as client:
        sent = [
            client.send(Message(TOPIC, b"ours", keys=[f"ours-{number}"], tag="tag", queue_id=0)).physical_offset
            for number in range(MESSAGES)
        ]
    group.wait_dispatched()
    group.kill()
    with RocketMq(tmp_path, REFERENCE) as rocketmq:
        opened = rocketmq.ask("open", store, options=expected["config"] | {"enableAcceleratedRecovery": "true"})
        assert opened["started"], opened
        rocketmq.ask("dump", store, to=str(tmp_path / "dump"))
        assert rocketmq.ask("close", store) == {"clean": True}
    dump = Dump(tmp_path / "dump")
    assert not dump.lines("bad")
    assert len(dump.records) == len(expected["records"]) + MESSAGES
    assert dump.pulled(TOPIC, 0)[-MESSAGES:] == sent
