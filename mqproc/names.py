"""What a topic may be called, as RocketMQ sees it. Clients ask before they send, the store before it believes."""

from __future__ import annotations

import re
from typing import Final

from mqproc.errors import BadTopicError

RETRY_PREFIX: Final = "%RETRY%"
DEAD_LETTER_PREFIX: Final = "%DLQ%"
MULTI_DISPATCH_PREFIX: Final = "%LMQ%"
"""RocketMQ's light queues: their units name records of other topics, and no topics.json names them."""
TOPIC_BYTES_MAX: Final = 127
RETRY_TOPIC_BYTES_MAX: Final = 255

_FOREIGN = re.compile(rb"[^%|A-Za-z0-9_-]")


def check_topic(topic: str) -> None:
    """Raise BadTopicError unless RocketMQ would take the name; the text tells the offending byte as hex."""
    if not isinstance(topic, str) or not topic:
        raise BadTopicError("topic is empty" if topic == "" else f"topic is {topic!r}, not text")
    data = topic.encode("utf-8", "surrogatepass")
    if foreign := _FOREIGN.search(data):
        place = foreign.start()
        raise BadTopicError(f"topic {topic[:64]!r} has byte 0x{data[place]:02X} at {place}; allowed are A-Za-z0-9_%|-")
    limit = RETRY_TOPIC_BYTES_MAX if topic.startswith(RETRY_PREFIX) else TOPIC_BYTES_MAX
    if len(data) > limit:
        raise BadTopicError(f"topic of {len(data)} bytes exceeds {limit}: {topic[:64]!r}…")
