"""A reader of a running store's files, while its group is stopped, started and killed."""

from __future__ import annotations

from mqproc import StoreReader
from tests.conftest import Group, wait_until


def test_it_goes_on_with_the_group_that_was_started_behind_the_one_it_was_opened_on(group: Group) -> None:
    with group.client() as client:
        client.create_topic("T", queues=1)
        client.send_batch("T", bodies=[b"1", b"2"])
        client.wait_dispatched()
    with StoreReader(group.store) as reader:
        assert reader.max_offset("T", 0) == 2
        queues = reader.reading.queues
        messages = reader.messages("T")
        assert next(messages).body == b"1"
        assert group.stop() == 0
        assert reader.max_offset("T", 0) == 2, "what its group has published is there still"
        group.start()
        with group.client() as client:
            client.send("T", b"3")
            client.create_topic("U", queues=1)
            client.send("U", b"4")
            client.wait_dispatched()
        wait_until(lambda: reader.max_offset("T", 0) == 3)
        assert [message.body for message in messages] == [b"2"], "as far as the queue was when they were asked for"
        assert [message.body for message in reader.messages()] == [b"1", b"2", b"3", b"4"]
        assert reader.count("T") == 3
        assert {topic.topic for topic in reader.topics()} >= {"T", "U"}
        assert reader.running
        old = queues.bounds("T", 0)
        assert old is not None
        assert old.max_offset == 2, "who still looks at the old group's queues sees them"
