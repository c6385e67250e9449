"""RocketMQ reads and continues a store of the profile `embedded`, with its sizes in RocketMQ's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

import mqproc
from mqproc.config.options import PROFILES, Profile
from tests.interop.rocketmq import VERSIONS, Dump, RocketMq, rocketmq_options

# The first test waits for the build.
pytestmark = pytest.mark.timeout(1000)

TOPIC = "Embedded"
MESSAGES = 1000


def send(client: mqproc.Client, first: int) -> list[int]:
    messages = [mqproc.Message(TOPIC, b"%d" % n, keys=[f"key-{n}"], queue_id=0) for n in range(first, first + MESSAGES)]
    sent = [result.physical_offset for result in client.send_many(messages)]
    client.wait_dispatched()
    return sent


@pytest.mark.parametrize("version", VERSIONS)
def test_rocketmq_reads_a_store_of_the_profile_embedded(tmp_path: Path, version: str) -> None:
    store, options = tmp_path / "store", {"metrics_port": 0}
    with mqproc.open(store, options=options) as client:
        sent = send(client, 0)
    with RocketMq(tmp_path, version) as rocketmq:
        opened = rocketmq.ask("open", store, options=rocketmq_options(PROFILES[Profile.EMBEDDED]))
        assert opened["started"], opened
        rocketmq.ask("dump", store, to=str(tmp_path / "dump"))
        assert rocketmq.ask("close", store) == {"clean": True}
    dump = Dump(tmp_path / "dump")
    assert not dump.lines("bad")
    assert dump.pulled(TOPIC, 0) == sent
    assert dump.keys[TOPIC, "key-7"] == [sent[7]]
    with mqproc.open(store, options=options) as client:
        sent += send(client, MESSAGES)
        found = [message.body for offset in (7, MESSAGES + 7) for message in client.by_key(TOPIC, f"key-{offset}")]
    assert found == [b"7", b"1007"]
