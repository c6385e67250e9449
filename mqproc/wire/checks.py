"""What a topic's name and a filter may be. Clients ask before they send, servers before they believe."""

from __future__ import annotations

import re
from typing import Final

from mqproc.errors import BadTopicError, FilterSyntaxError

TOPIC_BYTES_MAX: Final = 127
RETRY_PREFIX: Final = "%RETRY%"
RETRY_TOPIC_BYTES_MAX: Final = 255
FILTER_BYTES_MAX: Final = 4096

_FOREIGN = re.compile(rb"[^%|A-Za-z0-9_-]")
_SEPARATOR = re.compile("[\x01\x02]")


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


def parse_tags(expression: str) -> list[str]:
    """The tags of a filter `a || b`; none for the empty one and for `*`, which mean all.

    Raises FilterSyntaxError with the place of what no tag can have.
    """
    size = len(expression.encode("utf-8", "surrogatepass"))
    if size > FILTER_BYTES_MAX:
        raise FilterSyntaxError(f"filter of {size:,} bytes exceeds {FILTER_BYTES_MAX:,}", position=FILTER_BYTES_MAX)
    if separator := _SEPARATOR.search(expression):
        place = separator.start()
        raise FilterSyntaxError(f"filter has byte 0x{ord(separator[0]):02X} at {place}", position=place)
    if expression.strip() in ("", "*"):
        return []
    tags = [tag for part in expression.split("||") if (tag := part.strip())]
    if not tags:
        raise FilterSyntaxError(f"filter {expression[:64]!r} names no tag", position=0)
    return [] if "*" in tags else tags
