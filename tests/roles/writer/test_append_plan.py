"""Append plans: a cached template gives the same plan as a new one while it is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mqproc.config.options import Options
from mqproc.errors import (
    BadMessageError,
    BadPropertyError,
    BadRequestError,
    NoSuchQueueError,
    PermissionDeniedError,
    PropertiesTooLargeError,
    TopicNotFoundError,
    TopicReservedError,
)
from mqproc.io.store_io import StoreIO
from mqproc.kernels.append_run import PREFIX_DIGITS
from mqproc.layout import properties
from mqproc.paths import StorePaths
from mqproc.roles.writer.append_plan import (
    TEMPLATE_TEXT_MAX,
    TEMPLATES_MAX,
    AppendPlanner,
    constant_properties,
)
from mqproc.roles.writer.topics import WriterTopics
from mqproc.store.commitlog.append_templates import AppendPlan, AppendTemplate
from mqproc.store.consumequeue.table import QueueTable
from mqproc.wire.operations import AppendRequest

PREFIX = "A" * 28
NOW_MS = 1_700_000_000_000


class Planner:
    """Plans over a store of its own; each request has one body of four bytes."""

    def __init__(self, root: Path, **options: Any) -> None:
        paths = StorePaths(root)
        for folder in (paths.own, paths.consume_queue, paths.commit_log):
            folder.mkdir(parents=True)
        io = StoreIO()
        table = QueueTable.create(io, paths.queues, 64)
        settings = Options(**({"default_topic_queue_nums": 4} | options))
        self.topics = WriterTopics(io, io, paths, settings, table)
        self.plans = AppendPlanner(self.topics)

    def plan(self, payload: bytes = b"\4\0\0\0body", own: bool = False, **changes: Any) -> AppendPlan:
        request = AppendRequest("T", 1, bodies_bytes=4, unique_prefix=PREFIX, born_timestamp_ms=NOW_MS)
        plan, topic = self.plans.plan(msgspec.structs.replace(request, **changes), memoryview(payload), NOW_MS, own=own)
        if plan.template.fixed_queue == -1:
            plan.rotation = (plan.rotation + plan.count) % len(topic.queue_numbers)
        topic.rotation = plan.rotation
        return plan


@pytest.fixture
def planner(tmp_path: Path) -> Planner:
    return Planner(tmp_path / "store")


def test_plan_template_is_shared_by_frames_differing_in_ids_and_times(planner: Planner) -> None:
    first = planner.plan()
    payload = b"\2\0\0\0\1\0\0\0abc\1\0\1\0xy"
    second = planner.plan(
        payload,
        count=2,
        bodies_bytes=3,
        keys_bytes=2,
        unique_prefix="B" * 28,
        unique_counter=7,
        born_timestamp_ms=5,
    )
    assert second.template is first.template
    assert second.columns[:6] == (0, 8, 11, 15, -1, -1)
    assert (second.unique_prefix, second.unique_counter, second.born_timestamp_ms) == (b"B" * 28, 7, 5)
    assert bytes(second.payload) == payload


@pytest.mark.parametrize(
    "changes",
    [
        {"topic": "U"},
        {"queue_id": 2},
        {"tag": "t"},
        {"flag": 9},
        {"sys_flag": 8},
        {"batch": True},
        {"born_host": b"\1\2\3\4\0\0\0\5"},
        {"unique_prefix": ""},
        {"gap_before_unique": b"A\x01a\x02"},
        {"gap_after_keys": b"A\x01a\x02"},
    ],
)
def test_plan_different_fields_give_different_templates(planner: Planner, changes: dict[str, Any]) -> None:
    first = planner.plan()
    other = planner.plan(**changes)
    assert other.template is not first.template
    assert planner.plan(**changes).template is other.template
    assert planner.plan().template is first.template


def test_plan_cached_and_new_templates_are_equal(tmp_path: Path) -> None:
    """A planner's cached plans, compared with those of another planner."""
    for index, changes in enumerate([{}, {"tag": "t", "flag": 3}, {"queue_id": 1, "gap_before_tag": b"A\x01a\x02"}]):
        planner = Planner(tmp_path / f"kept-{index}")
        for others in ({"flag": 1}, {"tag": "other"}, {"queue_id": 2}, {"gap_before_tag": b"B\x01b\x02"}):
            planner.plan(**others)
        planner.plan(**changes)
        again = planner.plan(**changes).template
        new = Planner(tmp_path / f"new-{index}").plan(**changes).template
        assert again is not new
        assert _values(again) == _values(new)


def _values(template: AppendTemplate) -> dict[str, Any]:
    values = {name: getattr(template, name) for name in template.__struct_fields__}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def test_plan_whole_property_strings_use_a_cached_template(planner: Planner) -> None:
    payload = b"\4\0\0\0body\4\0a\x01b\x02"
    first = planner.plan(payload, properties_bytes=4, unique_prefix="").template
    assert planner.plan(payload, properties_bytes=4, unique_prefix="").template is first


def test_plan_queue_rotation_continues_with_a_cached_template(planner: Planner) -> None:
    assert [planner.plan().rotation for _ in range(5)] == [1, 2, 3, 0, 1]


def test_plan_widened_topic_uses_all_queues_at_once(planner: Planner) -> None:
    assert len(planner.plan().template.queue_numbers) == 4
    with pytest.raises(NoSuchQueueError):
        planner.plan(queue_id=5)
    planner.topics.create("T", 6)
    assert len(planner.plan().template.queue_numbers) == 6
    assert planner.plan(queue_id=5).template.fixed_queue == 5


def test_plan_deleted_topic_is_refused(tmp_path: Path) -> None:
    planner = Planner(tmp_path / "store", auto_create_topic_enable=False)
    planner.topics.create("T", 4)
    planner.plan()
    planner.topics.delete("T", 0)
    with pytest.raises(TopicNotFoundError):
        planner.plan()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"count": 0}, BadMessageError),
        ({"bodies_bytes": 3}, BadMessageError),
        ({"bodies_bytes": -1}, BadMessageError),
        ({"queue_id": -2}, BadMessageError),
        ({"unique_prefix": "short"}, BadPropertyError),
        ({"unique_prefix": "a" * 28}, BadPropertyError),
        ({"has_prepared": True}, BadMessageError),
        ({"born_host": b"\x7f"}, BadMessageError),
        ({"gap_before_tag": b"no pair"}, BadPropertyError),
        ({"tag": "a\x01"}, BadPropertyError),
    ],
)
def test_plan_checks_each_frame_of_a_known_template(
    planner: Planner, changes: dict[str, Any], error: type[Exception]
) -> None:
    planner.plan()
    with pytest.raises(error):
        planner.plan(**changes)
    planner.plan()


def test_plan_payload_size_differing_from_columns_is_refused(
    planner: Planner,
) -> None:
    planner.plan()
    first = planner.plan()
    for payload in (b"\4\0\0\0body!", b"\4\0\0\0bod"):
        with pytest.raises(BadMessageError, match="the columns take 8 bytes"):
            planner.plan(payload)
    assert planner.plan().columns == first.columns
    longer = planner.plan(b"\4\0\0\0body\1\0k", keys_bytes=1)
    assert longer.columns[:4] == (0, 4, 8, 10)
    assert planner.plan().columns == first.columns


def test_plan_role_permissions_are_not_cached_for_clients(planner: Planner) -> None:
    own = planner.plan(own=True, topic="%RETRY%G", reconsume_times=3, prepared_transaction_offset=5)
    assert (own.template.reconsume_times, own.template.prepared_transaction_offset, own.template.copies) == (3, 5, True)
    with pytest.raises(TopicReservedError):
        planner.plan(topic="SCHEDULE_TOPIC_XXXX")
    planner.plan(own=True, topic="SCHEDULE_TOPIC_XXXX")
    with pytest.raises(TopicReservedError):
        planner.plan(topic="SCHEDULE_TOPIC_XXXX")
    client = planner.plan(sys_flag=0xC, reconsume_times=3, prepared_transaction_offset=5)
    assert not client.template.copies
    assert (client.template.sys_flag, client.template.reconsume_times, client.template.prepared_transaction_offset) == (
        0,
        0,
        0,
    )


def test_plan_topic_without_write_permission_is_open_to_roles_only(planner: Planner) -> None:
    planner.plan()
    planner.topics.create("T", 4, perm=4)
    for changes in ({}, {"delay_level": 3}, {"deliver_at_ms": NOW_MS + 60_000}, {"transaction": True}):
        with pytest.raises(PermissionDeniedError, match="'T' may not be sent to"):
            planner.plan(**changes)
    planner.plan(own=True)
    planner.topics.create("T", 4, perm=6)
    planner.plan()
    for perm in (-1, 8):
        with pytest.raises(BadRequestError, match=f"perm = {perm} is out of range"):
            planner.topics.create("T", 4, perm=perm)


def test_plan_delayed_messages_are_replanned_each_time(planner: Planner) -> None:
    planner.plan()
    for _ in range(2):
        assert bytes(planner.plan(delay_level=3).template.topic_block[1:]) == b"SCHEDULE_TOPIC_XXXX"
    assert bytes(planner.plan(deliver_at_ms=NOW_MS + 60_000).template.topic_block[1:]) == b"rmq_sys_wheel_timer"
    assert bytes(planner.plan(deliver_at_ms=NOW_MS - 1).template.topic_block[1:]) == b"T"


def test_plan_delayed_target_is_reported_only_for_deduplication(planner: Planner, tmp_path: Path) -> None:
    looking = Planner(tmp_path / "looking", dedupe_window_messages=100)
    assert looking.plan(deliver_at_ms=NOW_MS - 1).template.delayed_template is None, "none has waited yet"
    for each in (planner, looking):
        delayed_request = each.plan(deliver_at_ms=NOW_MS + 60_000).template
        late = each.plan(deliver_at_ms=NOW_MS - 1).template
        assert delayed_request.real_queues is not None
        assert (delayed_request.real_topic, delayed_request.real_queues.tolist()) == (b"T", late.queue_numbers.tolist())
        if each is planner:
            assert late.delayed_template is None
            continue
        assert late.delayed_template is not None
        assert late.delayed_template.topic_block is delayed_request.topic_block
        assert (late.delayed_template.real_topic, late.delayed_template.real_queues) == (b"T", late.queue_numbers)


@pytest.mark.parametrize(
    ("payload", "changes"),
    [
        (b"\4\0\0\0body", {"tag": "t" * (TEMPLATE_TEXT_MAX + 1)}),
        (b"\4\0\0\0body\0\0", {"tags_bytes": 0, "tag": "unchecked"}),
        (b"\4\0\0\0body\0\0", {"properties_bytes": 0, "tag": "unchecked"}),
    ],
)
def test_plan_unchecked_requests_are_not_cached(planner: Planner, payload: bytes, changes: dict[str, Any]) -> None:
    first = planner.plan(payload, **changes)
    assert planner.plan(payload, **changes).template is not first.template


def test_plan_template_cache_is_bounded(planner: Planner) -> None:
    first = planner.plan(flag=0).template
    for flag in range(1, TEMPLATES_MAX):
        planner.plan(flag=flag)
    assert planner.plan(flag=0).template is first
    planner.plan(flag=TEMPLATES_MAX)
    assert planner.plan(flag=0).template is not first


def test_plan_refused_frame_creates_no_topic(planner: Planner) -> None:
    with pytest.raises(BadPropertyError):
        planner.plan(topic="new", tag="a\x01")
    with pytest.raises(BadMessageError):
        planner.plan(topic="new", bodies_bytes=3)
    assert planner.topics.topics.get("new") is None


# Constant properties


BUCKET_PREFIX = "A" * PREFIX_DIGITS


def request(**changes: Any) -> AppendRequest:
    return msgspec.structs.replace(AppendRequest("T", 1, unique_prefix=BUCKET_PREFIX), **changes)


def test_constant_properties_surround_id_tag_and_keys() -> None:
    found = constant_properties(request(tag="t", gap_before_unique=b"A\x01a\x02", gap_before_tag=b"B\x01b\x02"))
    assert found.parts == (b"A\x01a\x02UNIQ_KEY\x01", b"\x02B\x01b\x02TAGS\x01t\x02", b"", b"")


def test_constant_properties_without_id_write_none() -> None:
    assert constant_properties(request(unique_prefix="", tag="t")).parts[1] == b"TAGS\x01t\x02"


def test_constant_properties_tag_column_replaces_the_tag() -> None:
    large = "t" * 100_000
    assert constant_properties(request(tag=large, tags_bytes=3)).parts[1] == b"\x02"


def test_constant_properties_sharding_key_is_placed_by_bucket() -> None:
    assert properties.bucket("source") < properties.bucket(properties.SHARDING_KEY) < properties.bucket("name")
    before = b"source\x01first\x02"
    gap = before + b"name\x01last\x02"
    assert constant_properties(request(gap_before_unique=gap, sharding_bytes=4)).sharding_at == len(before)
    assert constant_properties(request(gap_before_unique=gap)).sharding_at == 0


def test_constant_properties_whole_strings_are_extended_only_if_delayed() -> None:
    gap = b"a\x01b\x02" * 100_000
    whole = request(
        properties_bytes=4, gap_before_unique=gap, gap_before_tag=gap, gap_before_keys=gap, gap_after_keys=gap
    )
    assert constant_properties(whole).parts == (b"", b"", b"", b"")
    waiting = request(properties_bytes=4, gap_after_keys=b"REAL_TOPIC\x01T\x02")
    assert constant_properties(waiting, delayed=True).parts == (b"", b"", b"", b"REAL_TOPIC\x01T\x02")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"gap_before_tag": b"no pair"}, BadPropertyError),
        ({"tag": "a\x01"}, BadPropertyError),
        ({"tag": "a\x02"}, BadPropertyError),
        ({"gap_after_keys": b"n\x01" + b"v" * 32_760 + b"\x02"}, PropertiesTooLargeError),
        ({"tag": "t" * 32_768}, PropertiesTooLargeError),
    ],
)
def test_constant_properties_invalid_values_are_refused(changes: dict[str, Any], error: type[BadRequestError]) -> None:
    with pytest.raises(error):
        constant_properties(request(**changes))
