"""Half messages and op messages of RocketMQ and of this store."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqproc import StoreReader
from mqproc.store.transactions import HalfMessage, decode_op_body, encode_op_body, parse_half
from mqproc.topic_names import HALF_TOPIC, OP_HALF_TOPIC
from tests.golden.fixtures import load_fixture


def half(**changes: object) -> HalfMessage:
    fields = {"offset": 0, "physical_offset": 0, "size": 1, "message_id": "", "group": "g", "topic": "T"}
    fields |= {"transaction_id": "x", "born_ms": 1000, "stored_ms": 1005, "checks": 0, "immunity_s": 0, "made_from": 0}
    return HalfMessage(**(fields | changes))  # type: ignore[arg-type]


def test_parse_half_reads_rocketmq_half_messages(tmp_path: Path) -> None:
    with StoreReader(load_fixture("i_broker", tmp_path).store) as store:
        halves = [parse_half(message) for message in store.messages(HALF_TOPIC)]
        op_offsets = [decode_op_body(message.body) for message in store.messages(OP_HALF_TOPIC)]
    assert op_offsets == [[0, 1, 3, 4, 7, 6]]
    assert {(each.group, each.topic) for each in halves} == {("txpg_LifeTopic", "LifeTopic")}
    assert [each.checks for each in halves] == [0] * 9 + [checks for checks in range(1, 6) for _ in range(3)]
    # Of nine transactions the three open ones were checked five times.
    assert len({each.key for each in halves}) == 9
    assert {each.key for each in halves[-3:]} == {halves[index].key for index in (2, 5, 8)}
    assert all(each.transaction_id and not each.made_from for each in halves)


def test_first_due_ms_depends_on_timeout_and_immunity() -> None:
    assert half().first_due_ms(6000, 30_000) == 7000
    assert half(immunity_s=60).first_due_ms(6000, 30_000) == 61_000
    # An immunity shorter than the timeout and a born time in the future are ignored.
    assert half(immunity_s=5).first_due_ms(6000, 30_000) == 7000
    assert half(born_ms=9_000_000).first_due_ms(6000, 30_000) == 7005
    assert half(checks=1, immunity_s=60).first_due_ms(6000, 30_000) == 31_005


@given(st.lists(st.integers(0, (1 << 59) - 1)))
def test_op_body_round_trips(offsets: list[int]) -> None:
    assert decode_op_body(encode_op_body(offsets)) == offsets


@pytest.mark.parametrize(
    ("body", "offsets"),
    [(b"", []), (b"12,15,", [12, 15]), (b"12", [12]), (b",,7,", [7]), (b"-1,x,\xff,3.5, 4,9", [9]), (b"9" * 99, [])],
)
def test_decode_op_body_skips_invalid_numbers(body: bytes, offsets: list[int]) -> None:
    assert decode_op_body(body) == offsets
