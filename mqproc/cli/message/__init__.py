"""Commands that send, import, replay and read messages. `mqproc message` finds them."""

from __future__ import annotations

import click

from mqproc.cli.options import CommandGroup

_LAZY = {
    "cancel": ("mqproc.cli.message.send:cancel", "Cancel a message that waits for its delivery time."),
    "get": ("mqproc.cli.message.find:get", "Show the message with an offset id, or with a unique id and its --topic."),
    "key": ("mqproc.cli.message.find:key", "Show the messages of TOPIC that have KEY."),
    "offset": ("mqproc.cli.message.find:offset", "Show the message at an OFFSET of a QUEUE."),
    "range": ("mqproc.cli.message.find:range_", "Show the messages of TOPIC with begin ≤ time < end, queue by queue."),
    "scan": ("mqproc.cli.message.find:scan", "Search the whole log by property, body or time, without a key."),
    "tag": ("mqproc.cli.message.find:tag", "Show the messages of TOPIC that have TAG, found by the index."),
    "trace": ("mqproc.cli.message.find:trace", "Show where a message is: queue, index, groups, retries, dead letters."),
}


@click.group(cls=CommandGroup, lazy=_LAZY, aliases={"id": "get"})
def message() -> None:
    """Find messages by id, key, offset, time or content; cancel timed ones.

    Times are ISO 8601 (local time without a zone), epoch milliseconds, or an age: 15m, 2h, 1d.
    """
