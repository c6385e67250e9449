"""A store that its group writes to meanwhile: a plan sees what was published then, the next one what is new."""

from __future__ import annotations

from mqproc import Message
from mqproc.spark.tasks import read_partition
from tests.conftest import Group
from tests.spark.rows import messages_of, offsets_of, options_of, partitions_of, rows_of


def test_rows_up_to_what_was_published(group: Group) -> None:
    with group.client() as client:
        for number in range(300):
            client.send(Message("Topic", b"%d" % number * 500, keys=[f"k{number}"]))
        group.wait_dispatched()
        options = options_of(group.store)
        before = partitions_of(group.store)
        assert offsets_of(group.store, splitBytes=20_000) == [each.physical_offset for each in messages_of(group.store)]
        for number in range(300, 350):
            client.send(Message("Topic", b"%d" % number * 500, keys=[f"k{number}"]))
        # The index may not have it yet: then it is found in the log.
        assert len(rows_of(group.store, topic="Topic", key="k349")) == 1
        assert len(rows_of(group.store)) == 350
    count = sum(batch.num_rows for part in before for batch in read_partition(options, ["topic"], part))
    assert count == 300
