"""Settings of consumer groups: RocketMQ's `config/subscriptionGroup.json`.

Each change replaces the file before it is confirmed. Unknown fields are written back unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.damage import quarantine_file
from mqproc.store.offsets.offset_store import UNWRITABLE_ERRNOS, EventLog
from mqproc.store.sync_guard import Syncing
from mqproc.topic_names import RETRY_MAX_TIMES, check_group

RETRY_TIMES_LIMIT: Final = 1 << 20
_TABLE: Final = "subscriptionGroupTable"
_INT_MAX: Final = (1 << 31) - 1
_TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False}
_JSON_NAMES: Final = {
    "consumeBroadcastEnable": "consume_broadcast_enable",
    "consumeEnable": "consume_enable",
    "consumeMessageOrderly": "consume_message_orderly",
    "retryMaxTimes": "retry_max_times",
    "retryQueueNums": "retry_queue_nums",
}
"""Fields of `GroupSettings` by their names in the file."""
_BASE: Final = {
    "attributes": {},
    "brokerId": 0,
    "consumeFromMinEnable": True,
    "consumeTimeoutMinute": 15,
    "groupRetryPolicy": {"type": "CUSTOMIZED"},
    "groupSysFlag": 0,
    "notifyConsumerIdsChangedEnable": True,
    "whichBrokerWhenConsumeSlowly": 1,
}


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Settings of one group. `retry_max_times`: deliveries before a message is a dead letter."""

    group: str
    retry_max_times: int = RETRY_MAX_TIMES
    retry_queue_nums: int = 1
    consume_enable: bool = True
    consume_message_orderly: bool = False
    consume_broadcast_enable: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def to_rocketmq(self) -> dict[str, Any]:
        own = {key: getattr(self, name) for key, name in _JSON_NAMES.items()}
        return dict(sorted((_BASE | self.extra | own | {"groupName": self.group}).items()))


class SubscriptionGroups:
    """Groups of one store. An unknown group has default settings until its first use."""

    def __init__(self, io: StoreIO, paths: StorePaths, syncs: Syncing, log: EventLog) -> None:
        """Load the file; an unreadable one is quarantined and logged. Raises OSError."""
        self._io = io
        self._syncs = syncs
        self._paths = paths
        self._path = paths.subscription_groups
        self._unreadable = False
        self.lost = False
        """Whether groups have lost their settings: the file was unreadable."""
        self._remark = ""
        self._groups: dict[str, GroupSettings] = {}
        self._encoded: dict[str, tuple[GroupSettings, msgspec.Raw]] = {}
        self._other: dict[str, Any] = {}
        self._version = 0
        try:
            _value, self._remark = rocketmq_json.load(io, self._path, self._take)
            if self._remark:
                log("subscriptionGroup.json was read with a remark", remark=self._remark)
        except CorruptStoreError as error:
            self._unreadable = self.lost = True
            log("subscriptionGroup.json cannot be read", error=str(error), moved_to=str(paths.quarantine))
            try:
                self._quarantine()
            except OSError as unwritten:
                if unwritten.errno not in UNWRITABLE_ERRNOS:
                    raise
                log("subscriptionGroup.json cannot be moved; it stays until it is replaced", error=str(unwritten))

    def _quarantine(self) -> None:
        if self._io.exists(self._path):
            quarantine_file(self._io, self._paths, self._path)
        self._unreadable = False

    def _take(self, value: dict[str, Any]) -> None:
        groups = _groups_in(value)
        version = value.get("dataVersion")
        counter = version.get("counter", 0) if isinstance(version, dict) else 0
        self._version = counter if isinstance(counter, int) else 0
        self._other = {name: of for name, of in value.items() if name not in (_TABLE, "dataVersion")}
        self._groups = groups

    def get(self, group: str) -> GroupSettings | None:
        """Settings of a group; None if it was not created."""
        return self._groups.get(group)

    def of(self, group: str) -> GroupSettings:
        """Settings of a group, or the defaults with which it would be created."""
        return self._groups.get(group) or GroupSettings(group)

    def names(self) -> list[str]:
        return sorted(self._groups)

    def add(self, settings: GroupSettings, time_ms: int) -> bool:
        """Create or change a group; return whether it changed. Raises BadRequestError, OSError."""
        check_group(settings.group)
        if not 0 <= settings.retry_max_times <= RETRY_TIMES_LIMIT:
            limit = f"from 0 to {RETRY_TIMES_LIMIT:,}"
            raise BadRequestError(f"retry_max_times = {settings.retry_max_times:,} is out of range: {limit}")
        before = self._groups.get(settings.group)
        if before is not None:
            settings = replace(settings, extra=before.extra)
        if before == settings:
            return False
        self._save(self._groups | {settings.group: settings}, time_ms)
        return True

    def delete(self, group: str, time_ms: int) -> bool:
        """Delete a group's settings; return whether it had any. Raises OSError."""
        if group not in self._groups:
            return False
        self._save({name: of for name, of in self._groups.items() if name != group}, time_ms)
        self._encoded.pop(group, None)
        return True

    def _save(self, groups: dict[str, GroupSettings], time_ms: int) -> None:
        """Replace the file; the groups in memory change only after that."""
        if self._unreadable:
            self._quarantine()
        version = {"counter": self._version + 1, "stateVersion": 0, "timestamp": time_ms}
        table = {name: self._encoded_group(groups[name]) for name in sorted(groups)}
        value = {"forbiddenTable": {}} | self._other | {"dataVersion": version, _TABLE: table}
        whole = dict(sorted(value.items()))
        rocketmq_json.save(self._io, self._syncs, self._path, whole, keeps_old=not self._remark)
        self._remark = ""
        self._groups, self._version = groups, self._version + 1

    def _encoded_group(self, settings: GroupSettings) -> msgspec.Raw:
        """The group's JSON, encoded only after a change: a store may have thousands of groups."""
        known = self._encoded.get(settings.group)
        if known is None or known[0] is not settings:
            known = settings, msgspec.Raw(msgspec.json.encode(settings.to_rocketmq()))
            self._encoded[settings.group] = known
        return known[1]


def check_file(io: StoreIO, paths: StorePaths) -> str:
    """Return a remark on the file, "" if it is fine. Raises CorruptStoreError."""
    return rocketmq_json.load(io, paths.subscription_groups, _groups_in)[1]


def group_names(io: StoreIO, paths: StorePaths) -> list[str]:
    """Names of all groups with settings. Raises CorruptStoreError, OSError."""
    value, _remark = rocketmq_json.load(io, paths.subscription_groups, _groups_in)
    return sorted(rocketmq_json.table_in(value, _TABLE)) if value else []


def _groups_in(value: Any) -> dict[str, GroupSettings]:
    """Parse the table of groups. Raises ValueError if it is invalid."""
    table = rocketmq_json.table_in(value, _TABLE)
    if not all(isinstance(entry, dict) for entry in table.values()):
        raise ValueError(f"no {_TABLE} in it")
    try:
        return {name: _from_rocketmq(name, entry) for name, entry in table.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_TABLE}: {error}") from None


def _from_rocketmq(name: str, entry: dict[str, Any]) -> GroupSettings:
    defaults = GroupSettings(name)
    own = {field: _convert(entry.get(key), getattr(defaults, field)) for key, field in _JSON_NAMES.items()}
    extra = {key: value for key, value in entry.items() if key not in _JSON_NAMES and key != "groupName"}
    return GroupSettings(name, **own, extra=extra)


def _convert(value: Any, default: int | bool) -> Any:
    """Convert like RocketMQ's parser: null means the default, text is parsed.

    Raises TypeError, ValueError.
    """
    if value is None:
        return default
    if isinstance(default, bool):
        if (found := _TRUTHS.get(str(value).lower())) is None:
            raise ValueError(f"{value!r} is neither true nor false")
        return found
    if not -_INT_MAX <= (number := int(value)) <= _INT_MAX:
        raise ValueError(f"{value!r} is not a valid number")
    return number
