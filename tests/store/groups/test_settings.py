"""Settings of groups as other programs, and people, may have written them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store.offsets.settings import GroupSettings, SubscriptionGroups, check_file


def read(folder: Path, entry: dict[str, Any]) -> tuple[SubscriptionGroups, list[str]]:
    """Settings of group "odd" beside another one's, and what was told."""
    paths = StorePaths(folder)
    paths.subscription_groups.parent.mkdir(exist_ok=True)
    table = {"odd": entry, "other": {"retryMaxTimes": 3, "consumeEnable": False}}
    paths.subscription_groups.write_text(json.dumps({"subscriptionGroupTable": table}))
    told: list[str] = []
    io = StoreIO()
    return SubscriptionGroups(io, paths, io, lambda event, **_fields: told.append(event)), told


@pytest.mark.parametrize(
    ("entry", "settings"),
    [
        ({"retryMaxTimes": None, "retryQueueNums": None, "consumeEnable": None}, GroupSettings("odd")),
        ({"consumeEnable": "false", "consumeBroadcastEnable": 0}, GroupSettings("odd", 16, 1, False, False, False)),
        ({"retryMaxTimes": "5", "consumeMessageOrderly": "True"}, GroupSettings("odd", 5, 1, True, True)),
        ({"retryMaxTimes": -1}, GroupSettings("odd", -1)),
    ],
)
def test_nulls_and_texts_mean_what_they_mean_to_rocketmq(
    tmp_path: Path, entry: dict[str, Any], settings: GroupSettings
) -> None:
    groups, told = read(tmp_path, entry)
    assert (groups.get("odd"), told) == (settings, [])
    assert groups.of("other") == GroupSettings("other", 3, consume_enable=False)


@pytest.mark.parametrize(
    "entry", [{"retryMaxTimes": 1e300}, {"retryQueueNums": 1 << 31}, {"retryMaxTimes": []}, {"consumeEnable": "maybe"}]
)
def test_what_is_no_setting_is_told_and_kept_aside(tmp_path: Path, entry: dict[str, Any]) -> None:
    """Numbers that have no room in an answer too: it ended every look at the group in an error of Python's."""
    groups, told = read(tmp_path, entry)
    assert (groups.names(), told) == ([], ["subscriptionGroup.json cannot be read"])
    paths = StorePaths(tmp_path)
    (paths.quarantine / "config.subscriptionGroup.json").rename(paths.subscription_groups)
    with pytest.raises(CorruptStoreError, match="subscriptionGroupTable"):
        check_file(StoreIO(), paths)


def test_a_copy_alone_that_nobody_can_read_ends_nothing(tmp_path: Path) -> None:
    """There was nothing to be moved, and the query role ended with an error that named no file, at each start."""
    paths, io, told = StorePaths(tmp_path), StoreIO(), []
    paths.config.mkdir()
    paths.subscription_groups.with_name("subscriptionGroup.json.bak").write_text("{ not json")
    groups = SubscriptionGroups(io, paths, io, lambda event, **_fields: told.append(event))
    assert (groups.names(), told) == ([], ["subscriptionGroup.json cannot be read"])
    assert groups.add(GroupSettings("new"), 1)
    assert SubscriptionGroups(io, paths, io, lambda event, **_fields: told.append(event)).names() == ["new"]


@pytest.mark.parametrize(
    "wrong", [b'{"subscriptionGroupTable":[]}', b'{"subscriptionGroupTable":{"g":[]}}', b"null", b'{"a":1}']
)
def test_the_copy_counts_where_the_file_cannot_be_used(tmp_path: Path, wrong: bytes) -> None:
    """It was passed over: every group had the defaults again, and the next change made the wrong file the copy."""
    read(tmp_path, {"retryMaxTimes": 5})
    paths, io, told = StorePaths(tmp_path), StoreIO(), []
    copy = paths.subscription_groups.with_name("subscriptionGroup.json.bak")
    paths.subscription_groups.rename(copy)
    paths.subscription_groups.write_bytes(wrong)
    assert check_file(io, paths).startswith("subscriptionGroup.json: ")
    groups = SubscriptionGroups(io, paths, io, lambda event, **_fields: told.append(event))
    assert (groups.of("odd").retry_max_times, told) == (5, ["subscriptionGroup.json was read with a remark"])
    before = copy.read_bytes()
    assert groups.add(GroupSettings("new"), 1)
    assert (copy.read_bytes(), check_file(io, paths)) == (before, "")
    assert groups.delete("new", 2)
    assert b"new" in copy.read_bytes()


def test_what_was_moved_aside_before_stays(tmp_path: Path) -> None:
    for number in range(2):
        read(tmp_path, {"retryMaxTimes": [number]})
    assert len(list(StorePaths(tmp_path).quarantine.iterdir())) == 2
