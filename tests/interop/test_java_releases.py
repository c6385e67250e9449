"""Stores of each release are extended by mqproc, by each release, and by mqproc again.

So index entries for tags, which RocketMQ makes since 5.4, are followed by entries of a release without them, and the
other way round.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest

from mqproc import Message
from tests.golden.fixtures import KEPT, load_store, options_of, read_expected
from tests.interop.rocketmq import VERSIONS, Dump, Line, RocketMq, golden_of
from tests.support.command_line import call
from tests.support.group import Group
from tests.support.store_checks import flags_of

# The first test waits for the build.
pytestmark = pytest.mark.timeout(1000)

TOPIC = "Extended"
MESSAGES = 30


def put(number: int) -> Line:
    return {
        "topic": TOPIC,
        "queueId": 0,
        "body": base64.b64encode(b"theirs %d" % number).decode(),
        "properties": {"UNIQ_KEY": f"{number:032X}", "KEYS": f"theirs-{number}", "TAGS": "tag"},
        "sysFlag": 0,
        "bornHost": "10.1.2.3",
        "storeHost": "192.168.1.2",
    }


def send_ours(group: Group, first: int) -> dict[int, str]:
    """Send messages through a run of the group; returns their keys by physical offset."""
    with group.client() as client:
        sent = {}
        for number in range(first, first + MESSAGES):
            message = Message(TOPIC, b"ours", keys=[f"ours-{number}"], tag="tag", queue_id=0)
            sent[client.send(message).physical_offset] = f"ours-{number}"
        group.wait_dispatched()
    return sent


@pytest.mark.parametrize("made_by", VERSIONS)
def test_store_is_extended_by_us_and_each_release_in_turn(
    made_by: str, rocketmq: RocketMq, tmp_path: Path, make_group: Callable[..., Group]
) -> None:
    golden = golden_of(made_by)
    expected, store = read_expected("a_basic", golden), load_store("a_basic", tmp_path, golden)
    options = options_of(expected)
    sizes = {name: getattr(options, name) for name in ("max_message_size", "mapped_file_size_commit_log")}
    group = make_group("store", **KEPT, **sizes)
    sent = send_ours(group, 0)
    assert group.stop() == 0

    opened = rocketmq.ask("open", store, options=expected["config"])
    assert opened["started"], opened
    rocketmq.ask("dump", store, to=str(tmp_path / "dump"))
    answers = rocketmq.ask("append", store, messages=[put(number) for number in range(MESSAGES)])
    assert rocketmq.ask("close", store) == {"clean": True}
    dump = Dump(tmp_path / "dump")
    assert not dump.lines("bad")
    assert len(dump.records) == len(expected["records"]) + MESSAGES
    assert {dump.keys[(TOPIC, key)][0] for key in sent.values()} == set(sent)
    assert {answer["status"] for answer in answers} == {"PUT_OK"}

    group.start()
    later = send_ours(group, MESSAGES)
    with group.client() as client:
        for place, key in (sent | later).items():
            assert [message.physical_offset for message in client.by_key(TOPIC, key)] == [place]
        for number, answer in enumerate(answers):
            (found,) = client.by_key(TOPIC, f"theirs-{number}")
            assert (found.physical_offset, found.body) == (answer["physicalOffset"], b"theirs %d" % number)
        assert len(list(client.range(TOPIC))) == 3 * MESSAGES
    assert group.stop() == 0
    verified = call("store", "verify", store, "--json", *flags_of(options))
    assert (verified.code, verified.json["damage"]) == (0, 0), verified.json["findings"][:3]
    repaired = call("store", "repair", store, "--execute", *flags_of(options))
    assert (repaired.code, repaired.out.endswith("nothing to repair\n")) == (0, True)
