"""All messages by key that were asked for, though they are more than one answer of the server's holds."""

from __future__ import annotations

from mqproc.client import core
from mqproc.client.core import Call, Page, Time, TimeKind
from mqproc.client.group_steps import Steps
from mqproc.message import StoredMessage


def by_key(
    topic: str, key: str, begin: Time, end: Time, max_messages: int, unique: bool, time: TimeKind, page_bytes: int
) -> Steps[list[StoredMessage]]:
    """The newest `max_messages` by key, oldest first; `page_bytes` of them at once."""
    pages: list[list[StoredMessage]] = []
    call: Call[Page] | None = core.by_key_page(topic, key, begin, end, max_messages, unique, time, page_bytes)
    while call is not None:
        page: Page = yield call
        pages.append(page.messages)
        call = page.next_call
    return pages[0] if len(pages) == 1 else [message for messages in reversed(pages) for message in messages]
