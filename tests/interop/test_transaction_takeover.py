"""Takeover of a broker's open transactions: each is checked and ended once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqproc import TransactionEndedError
from mqproc.client import transaction_requests as transaction_calls
from mqproc.client.transaction_requests import Handle
from mqproc.store import rocketmq_json
from mqproc.store.transactions import decode_op_body
from mqproc.topic_names import HALF_TOPIC, OP_HALF_TOPIC
from mqproc.types import StoredMessage
from tests.golden.fixtures import KEPT, load_fixture
from tests.support.group import Group, wait_until

PRODUCERS = "txpg_LifeTopic"


def test_brokers_open_transactions_are_checked_and_ended(tmp_path: Path) -> None:
    """Of nine, three are committed, three rolled back, and three open after five checks."""
    group = Group(load_fixture("i_broker", tmp_path).store)
    group.options = KEPT | {"max_message_size": 32768, "transaction_check_interval": 3_600_000}
    group.start()
    asked: list[StoredMessage] = []

    def checker(message: StoredMessage) -> bool | None:
        asked.append(message)
        return {b"tx 2": True, b"tx 5": False, b"tx 8": None}[message.body]

    try:
        with group.client() as client:
            (found,) = [wait_until(lambda: client.transactions.open(PRODUCERS), what="the open transactions")]
            assert [(each.topic, each.checks) for each in found] == [("LifeTopic", 5)] * 3
            written = group.words()["written"]
            with client.transaction_producer(PRODUCERS, checker):
                # No check is stored: the broker's last copies are checked.
                wait_until(
                    lambda: len(asked) == 3 and len(client.transactions.open(PRODUCERS)) == 1, what="two decided"
                )
            assert sorted(each.body for each in asked) == [b"tx 2", b"tx 5", b"tx 8"]
            assert {(each.topic, each.keys) for each in asked} == {("LifeTopic", (f"tx{n}",)) for n in (2, 5, 8)}
            client.wait_dispatched()
            new = [each for each in client.scan(physical_offset=written) if each.topic == "LifeTopic"]
            half = next(each for each in asked if each.body == b"tx 2")
            assert [(each.body, each.queue_id, each.sys_flag) for each in new] == [(b"tx 2", 3, 8)]
            assert new[0].prepared_transaction_offset == half.physical_offset
            assert {**new[0].properties} == {**half.properties}
            # Transactions ended by RocketMQ remain ended.
            first, second = client.pull(HALF_TOPIC, 0, 0, 2).messages
            ended = [Handle(PRODUCERS, "LifeTopic", each.unique_id, each.physical_offset) for each in (first, second)]
            client.run(transaction_calls.end(ended[0], commit=True))
            client.run(transaction_calls.end(ended[1], commit=False))
            for handle, commit in zip(ended, (False, True), strict=True):
                with pytest.raises(TransactionEndedError):
                    client.run(transaction_calls.end(handle, commit=commit))
            (marks,) = [wait_until(lambda: client.pull(OP_HALF_TOPIC, 0, 1).messages, what="marks")]
            assert sorted(offset for each in marks for offset in decode_op_body(each.body)) == [21, 22]
        assert group.stop() == 0
        saved = rocketmq_json.parse(group.paths.consumer_offsets.read_text())["offsetTable"]
        assert saved[f"{HALF_TOPIC}@CID_RMQ_SYS_TRANS"] == {"0": 23}
        assert saved[f"{OP_HALF_TOPIC}@CID_RMQ_SYS_TRANS"]["0"] > 1
    finally:
        group.close()
