"""Group settings as written by other programs or edited by hand."""

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
    """Settings of group "odd" next to those of another group, and the reported events."""
    paths = StorePaths(folder)
    paths.subscription_groups.parent.mkdir(exist_ok=True)
    table = {"odd": entry, "other": {"retryMaxTimes": 3, "consumeEnable": False}}
    paths.subscription_groups.write_text(json.dumps({"subscriptionGroupTable": table}))
    events: list[str] = []
    io = StoreIO()
    return SubscriptionGroups(io, paths, io, lambda event, **_fields: events.append(event)), events


@pytest.mark.parametrize(
    ("entry", "settings"),
    [
        ({"retryMaxTimes": None, "retryQueueNums": None, "consumeEnable": None}, GroupSettings("odd")),
        ({"consumeEnable": "false", "consumeBroadcastEnable": 0}, GroupSettings("odd", 16, 1, False, False, False)),
        ({"retryMaxTimes": "5", "consumeMessageOrderly": "True"}, GroupSettings("odd", 5, 1, True, True)),
        ({"retryMaxTimes": -1}, GroupSettings("odd", -1)),
    ],
)
def test_read_nulls_and_texts_as_rocketmq_does(tmp_path: Path, entry: dict[str, Any], settings: GroupSettings) -> None:
    groups, events = read(tmp_path, entry)
    assert (groups.get("odd"), events) == (settings, [])
    assert groups.of("other") == GroupSettings("other", 3, consume_enable=False)


@pytest.mark.parametrize(
    "entry", [{"retryMaxTimes": 1e300}, {"retryQueueNums": 1 << 31}, {"retryMaxTimes": []}, {"consumeEnable": "maybe"}]
)
def test_read_invalid_settings_quarantines_file(tmp_path: Path, entry: dict[str, Any]) -> None:
    """Includes numbers out of range, for which reading the group raised a Python error."""
    groups, events = read(tmp_path, entry)
    assert (groups.names(), events) == ([], ["subscriptionGroup.json cannot be read"])
    paths = StorePaths(tmp_path)
    (paths.quarantine / "config.subscriptionGroup.json").rename(paths.subscription_groups)
    with pytest.raises(CorruptStoreError, match="subscriptionGroupTable"):
        check_file(StoreIO(), paths)


def test_read_unreadable_backup_without_file_starts_empty(tmp_path: Path) -> None:
    """The query role ended at each start with an error that named no file."""
    paths, io, events = StorePaths(tmp_path), StoreIO(), []
    paths.config.mkdir()
    paths.subscription_groups.with_name("subscriptionGroup.json.bak").write_text("{ not json")
    groups = SubscriptionGroups(io, paths, io, lambda event, **_fields: events.append(event))
    assert (groups.names(), events) == ([], ["subscriptionGroup.json cannot be read"])
    assert groups.add(GroupSettings("new"), 1)
    assert SubscriptionGroups(io, paths, io, lambda event, **_fields: events.append(event)).names() == ["new"]


@pytest.mark.parametrize(
    "wrong", [b'{"subscriptionGroupTable":[]}', b'{"subscriptionGroupTable":{"g":[]}}', b"null", b'{"a":1}']
)
def test_read_invalid_file_uses_backup(tmp_path: Path, wrong: bytes) -> None:
    """Without the backup every group has the defaults, and the next change replaces the backup."""
    read(tmp_path, {"retryMaxTimes": 5})
    paths, io, events = StorePaths(tmp_path), StoreIO(), []
    copy = paths.subscription_groups.with_name("subscriptionGroup.json.bak")
    paths.subscription_groups.rename(copy)
    paths.subscription_groups.write_bytes(wrong)
    assert check_file(io, paths).startswith("subscriptionGroup.json: ")
    groups = SubscriptionGroups(io, paths, io, lambda event, **_fields: events.append(event))
    assert (groups.of("odd").retry_max_times, events) == (5, ["subscriptionGroup.json was read with a remark"])
    before = copy.read_bytes()
    assert groups.add(GroupSettings("new"), 1)
    assert (copy.read_bytes(), check_file(io, paths)) == (before, "")
    assert groups.delete("new", 2)
    assert b"new" in copy.read_bytes()


def test_quarantine_keeps_earlier_files(tmp_path: Path) -> None:
    for number in range(2):
        read(tmp_path, {"retryMaxTimes": [number]})
    assert len(list(StorePaths(tmp_path).quarantine.iterdir())) == 2
