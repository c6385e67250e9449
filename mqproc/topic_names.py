"""What a topic may be called, as RocketMQ sees it. Clients ask before they send, the store before it believes."""

from __future__ import annotations

import re
from typing import Final

from mqproc.errors import BadRequestError, BadTopicError
from mqproc.util.units import DELAY_LEVELS

RETRY_PREFIX: Final = "%RETRY%"
DEAD_LETTER_PREFIX: Final = "%DLQ%"
MULTI_DISPATCH_PREFIX: Final = "%LMQ%"
"""RocketMQ's light queues: their units name records of other topics, and no topics.json names them."""
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
"""Where messages with a delay level wait: queue level − 1."""
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
"""Where messages with a time to deliver at wait."""
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
"""Where the messages of open transactions wait."""
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
"""Which of them were committed or rolled back."""
CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
"""Messages whose transaction nobody would decide."""
REVIVE_TOPIC: Final = "rmq_sys_REVIVE_LOG_DefaultCluster"
"""Check points of messages that simple consumers have received."""
REVIVE_QUEUES: Final = 8
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
"""Groups of the system's own: their progress says which transactions and check points may be open."""
CHECK_POINT_MESSAGES: Final = 32
"""Of one check point, at most: RocketMQ's broker keeps what is acknowledged in as many bits."""
REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
"""Its progress in the revive topic is where check points begin that may be open."""
SINGLE_QUEUE_TOPICS: Final = frozenset({TIMER_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, CHECK_MAX_TIME_TOPIC})
TOPIC_BYTES_MAX: Final = 127
RETRY_TOPIC_BYTES_MAX: Final = 255
FILTER_BYTES_MAX: Final = 4096
"""Of a filter's text, by tags or by properties."""

_FOREIGN = re.compile(rb"[^%|A-Za-z0-9_-]")


def queues_of_own(topic: str, default: int) -> int:
    """How many queues a topic has that the system makes for itself; `default` for a user's."""
    if topic == SCHEDULE_TOPIC:
        return DELAY_LEVELS
    if topic == REVIVE_TOPIC:
        return REVIVE_QUEUES
    single = topic in SINGLE_QUEUE_TOPICS or topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
    return 1 if single else default


def check_topic(topic: str) -> None:
    """Raise BadTopicError unless RocketMQ would take the name; the text tells the offending byte as hex."""
    if not isinstance(topic, str) or not topic:
        raise BadTopicError("topic is empty" if isinstance(topic, str) else f"topic is {topic!r}, not text")
    data = topic.encode("utf-8", "surrogatepass")
    if foreign := _FOREIGN.search(data):
        place = foreign.start()
        raise BadTopicError(f"topic {topic[:64]!r} has byte 0x{data[place]:02X} at {place}; allowed are A-Za-z0-9_%|-")
    limit = RETRY_TOPIC_BYTES_MAX if topic.startswith(RETRY_PREFIX) else TOPIC_BYTES_MAX
    if len(data) > limit:
        raise BadTopicError(f"topic of {len(data)} bytes exceeds {limit}: {topic[:64]!r}…")


# Groups

GROUP_BYTES_MAX: Final = TOPIC_BYTES_MAX - len(RETRY_PREFIX)
"""Longest group name whose retry and dead-letter topics fit a record of RocketMQ's first version."""
RETRY_MAX_TIMES: Final = 16
_FOREIGN_IN_GROUP: Final = re.compile(r"[^%|A-Za-z0-9_-]")


def check_group(group: str) -> None:
    """Raise BadRequestError unless RocketMQ accepts the group name."""
    if not isinstance(group, str) or not group:
        raise BadRequestError("the group's name is empty" if group == "" else f"group is {group!r}, not text")
    if found := _FOREIGN_IN_GROUP.search(group):
        raise BadRequestError(f"group {group[:64]!r} has {found[0]!r} at {found.start()}; allowed are A-Za-z0-9_%|-")
    if len(group) > GROUP_BYTES_MAX:
        raise BadRequestError(f"group of {len(group)} bytes exceeds {GROUP_BYTES_MAX}: {group[:64]!r}…")
    reject_system_group(group)


def reject_system_group(group: str) -> None:
    """Raise BadRequestError for a group that RocketMQ reserves for itself."""
    if group.startswith(SYSTEM_GROUP_PREFIX):
        raise BadRequestError(f"group {group[:64]!r} is a system group: it cannot be joined, moved or deleted")


def retry_topic(group: str) -> str:
    """Topic from which messages are redelivered to a group."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """Topic for messages with exhausted retries. Raises BadRequestError if not text."""
    if not isinstance(group, str):
        raise BadRequestError(f"group is {group!r}, not text")
    return DEAD_LETTER_PREFIX + group
