"""Settings of consumer groups: `config/subscriptionGroup.json`, RocketMQ's, owned by the query role.

Fields that are none of ours are written back as they were. The file is replaced at each change, before it is answered.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mqproc.errors import BadRequestError, CorruptStoreError
from mqproc.io import StoreIO
from mqproc.names import DEAD_LETTER_PREFIX, RETRY_PREFIX, SYSTEM_GROUP_PREFIX, TOPIC_BYTES_MAX
from mqproc.paths import StorePaths
from mqproc.store import rocketmq_json
from mqproc.store.aside import move_aside
from mqproc.store.final_syncs import Syncing
from mqproc.store.groups.progress import Tell
from mqproc.store.groups.unwritable import UNWRITABLE

GROUP_BYTES_MAX: Final = TOPIC_BYTES_MAX - len(RETRY_PREFIX)
"""So that the names of its retry and dead-letter topics fit a record of RocketMQ's first version."""
RETRY_MAX_TIMES: Final = 16
RETRY_TIMES_LIMIT: Final = 1 << 20
_TABLE: Final = "subscriptionGroupTable"
_INT_MAX: Final = (1 << 31) - 1
_TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False}
_FOREIGN: Final = re.compile(r"[^%|A-Za-z0-9_-]")
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


def check_group(group: str) -> None:
    """Raise BadRequestError unless RocketMQ would take the name of a group."""
    if not isinstance(group, str) or not group:
        told = f"group is {group!r}, not text" if not isinstance(group, str) else "the group's name is empty"
        raise BadRequestError(told)
    if found := _FOREIGN.search(group):
        raise BadRequestError(f"group {group[:64]!r} has {found[0]!r} at {found.start()}; allowed are A-Za-z0-9_%|-")
    if len(group) > GROUP_BYTES_MAX:
        raise BadRequestError(f"group of {len(group)} bytes exceeds {GROUP_BYTES_MAX}: {group[:64]!r}…")
    refuse_system_group(group)


def refuse_system_group(group: str) -> None:
    """Raise BadRequestError for a group that RocketMQ keeps to itself: who moves it loses what it stands for."""
    if group.startswith(SYSTEM_GROUP_PREFIX):
        raise BadRequestError(f"group {group[:64]!r} is the system's own: it cannot be joined, moved or deleted")


def retry_topic(group: str) -> str:
    """Where messages come again that a group could not consume."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """Where messages end that a group could never consume. Raises BadRequestError for what is no name."""
    if not isinstance(group, str):
        raise BadRequestError(f"group is {group!r}, not text")
    return DEAD_LETTER_PREFIX + group


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """One group's settings. After `retry_max_times` deliveries from the retry topic a message is a dead letter."""

    group: str
    retry_max_times: int = RETRY_MAX_TIMES
    retry_queue_nums: int = 1
    consume_enable: bool = True
    consume_message_orderly: bool = False
    consume_broadcast_enable: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def to_rocketmq(self) -> dict[str, Any]:
        own = {
            "consumeBroadcastEnable": self.consume_broadcast_enable,
            "consumeEnable": self.consume_enable,
            "consumeMessageOrderly": self.consume_message_orderly,
            "groupName": self.group,
            "retryMaxTimes": self.retry_max_times,
            "retryQueueNums": self.retry_queue_nums,
        }
        return dict(sorted((_BASE | self.extra | own).items()))


class SubscriptionGroups:
    """The groups of one store. A group that nobody made has the defaults and is made at its first use."""

    def __init__(self, io: StoreIO, paths: StorePaths, syncs: Syncing, tell: Tell) -> None:
        """A file that nobody can read is moved aside and told; then groups have defaults. Raises OSError."""
        self._io = io
        self._syncs = syncs
        self._paths = paths
        self._path = paths.subscription_groups
        self._unreadable = False
        self._remark = ""
        self._groups: dict[str, GroupSettings] = {}
        self._other: dict[str, Any] = {}
        self._version = 0
        try:
            _value, self._remark = rocketmq_json.load(io, self._path, self._take)
            if self._remark:
                tell("subscriptionGroup.json was read with a remark", remark=self._remark)
        except CorruptStoreError as error:
            self._unreadable = True
            tell("subscriptionGroup.json cannot be read", error=str(error), moved_to=str(paths.aside))
            try:
                self._move_aside()
            except OSError as unwritten:
                if unwritten.errno not in UNWRITABLE:
                    raise
                tell("subscriptionGroup.json cannot be moved, and stays until it is replaced", error=str(unwritten))

    def _move_aside(self) -> None:
        if self._io.exists(self._path):
            move_aside(self._io, self._paths, self._path)
        self._unreadable = False

    def _take(self, value: dict[str, Any]) -> None:
        groups = _groups_in(value)
        version = value.get("dataVersion")
        counter = version.get("counter", 0) if isinstance(version, dict) else 0
        self._version = counter if isinstance(counter, int) else 0
        self._other = {name: of for name, of in value.items() if name not in (_TABLE, "dataVersion")}
        self._groups = groups

    def get(self, group: str) -> GroupSettings | None:
        """None for a group that nobody has made."""
        return self._groups.get(group)

    def of(self, group: str) -> GroupSettings:
        """A group's settings, or those that it would be made with."""
        return self._groups.get(group) or GroupSettings(group)

    def names(self) -> list[str]:
        return sorted(self._groups)

    def add(self, settings: GroupSettings, time_ms: int) -> bool:
        """Make a group, or change it; returns whether anything changed. Raises BadRequestError, OSError."""
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
        """Let a group have no settings; returns whether it had. Raises OSError."""
        if group not in self._groups:
            return False
        self._save({name: of for name, of in self._groups.items() if name != group}, time_ms)
        return True

    def _save(self, groups: dict[str, GroupSettings], time_ms: int) -> None:
        """In memory it is changed only when it is durable."""
        if self._unreadable:
            self._move_aside()
        version = {"counter": self._version + 1, "stateVersion": 0, "timestamp": time_ms}
        table = {name: groups[name].to_rocketmq() for name in sorted(groups)}
        value = {"forbiddenTable": {}} | self._other | {"dataVersion": version, _TABLE: table}
        whole = dict(sorted(value.items()))
        rocketmq_json.save(self._io, self._syncs, self._path, whole, keeps_old=not self._remark)
        self._remark = ""
        self._groups, self._version = groups, self._version + 1


def check_file(io: StoreIO, paths: StorePaths) -> str:
    """A remark on the file, "" when all is well. Raises CorruptStoreError when it cannot be read."""
    return rocketmq_json.load(io, paths.subscription_groups, _groups_in)[1]


def _groups_in(value: Any) -> dict[str, GroupSettings]:
    """Raises ValueError for what cannot be used."""
    table = rocketmq_json.table_in(value, _TABLE)
    if not all(isinstance(entry, dict) for entry in table.values()):
        raise ValueError(f"no {_TABLE} in it")
    try:
        return {name: _from_rocketmq(name, entry) for name, entry in table.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{_TABLE}: {error}") from None


def _from_rocketmq(name: str, entry: dict[str, Any]) -> GroupSettings:
    own = {
        "consumeBroadcastEnable",
        "consumeEnable",
        "consumeMessageOrderly",
        "groupName",
        "retryMaxTimes",
        "retryQueueNums",
    }
    return GroupSettings(
        name,
        _number(entry.get("retryMaxTimes"), RETRY_MAX_TIMES),
        _number(entry.get("retryQueueNums"), 1),
        _truth(entry.get("consumeEnable"), True),
        _truth(entry.get("consumeMessageOrderly"), False),
        _truth(entry.get("consumeBroadcastEnable"), True),
        {key: value for key, value in entry.items() if key not in own},
    )


def _number(value: Any, default: int) -> int:
    """As RocketMQ's parser has it: what is null is as if it were not there, and texts are read. Raises ValueError."""
    number = default if value is None else int(value)
    if not -_INT_MAX <= number <= _INT_MAX:
        raise ValueError(f"{value!r} is no number of times or queues")
    return number


def _truth(value: Any, default: bool) -> bool:
    """The same; raises ValueError. A group whose "false" counted as true would consume."""
    if value is None:
        return default
    found = _TRUTHS.get(str(value).lower())
    if found is None:
        raise ValueError(f"{value!r} is neither true nor false")
    return found
