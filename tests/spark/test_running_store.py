"""Reads of a store with a running writer: a plan covers the messages published so far."""

from __future__ import annotations

from contextlib import closing

import pytest

from mqproc import Message
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.layout.control import MIN_PHYSICAL_OFFSET
from mqproc.spark.batches import read_partition
from mqproc.store.commitlog.segments import LogSegments
from tests.spark.support import messages_of, offsets_of, options_of, partitions_of, rows_of
from tests.support.group import Group


def test_plan_covers_published_rows(group: Group) -> None:
    with group.client() as client:
        for number in range(300):
            client.send(Message("Topic", b"%d" % number * 500, keys=[f"k{number}"]))
        group.wait_dispatched()
        options = options_of(group.store)
        before = partitions_of(group.store)
        assert offsets_of(group.store, splitBytes=20_000) == [each.physical_offset for each in messages_of(group.store)]
        for number in range(300, 350):
            client.send(Message("Topic", b"%d" % number * 500, keys=[f"k{number}"]))
        # The index may not contain it yet; it is then found in the log.
        assert len(rows_of(group.store, topic="Topic", key="k349")) == 1
        assert len(rows_of(group.store)) == 350
    count = sum(batch.num_rows for part in before for batch in read_partition(options, ["topic"], part))
    assert count == 300


@pytest.mark.parametrize("is_listed", [False, True])
def test_segments_deleted_during_planning(group: Group, monkeypatch: pytest.MonkeyPatch, *, is_listed: bool) -> None:
    with group.client() as client:
        client.send_batch("Topic", [b"x" * 200_000] * 12)
        client.wait_dispatched()
    left = [each.physical_offset for each in messages_of(group.store) if each.physical_offset >= 1 << 20]
    starts = LogSegments.starts

    def starts_meanwhile(log: LogSegments) -> list[int]:
        listed = starts(log)
        if 0 in listed:
            with closing(Control.open(StoreIO(), group.paths, write=True)) as control:
                control.store(MIN_PHYSICAL_OFFSET, 1 << 20)
            log.path(0).unlink()
        return listed if is_listed else starts(log)

    monkeypatch.setattr(LogSegments, "starts", starts_meanwhile)
    assert offsets_of(group.store) == left
    assert left
