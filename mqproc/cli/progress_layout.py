"""Which bytes of `mqproc/progress` and `mqproc/errors` are what; see `file_layout`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from mqproc.cli.store.file_fields import Range, Ranges
from mqproc.layout import committed_offsets as progress
from mqproc.layout import error_log
from mqproc.layout.control import WORD_SIZE

_PROGRESS_HEADER: Final = (
    ("magic", progress.HEADER_MAGIC, "MQPGR01"),
    ("version", progress.HEADER_VERSION, ""),
    ("end", progress.HEADER_END, "bytes of the file in use"),
    ("boot", progress.HEADER_BOOT[0], "the machine's run in which the words were stored"),
    ("boot", progress.HEADER_BOOT[1], "its second half"),
    ("saved", progress.HEADER_SAVED, "fingerprint of the consumerOffset.json that was written last"),
    ("saving", progress.HEADER_SAVING, "of the one that is being written"),
    ("epoch", progress.HEADER_EPOCH, "number of the next assignment of a queue to a member"),
    ("reset_at", progress.HEADER_RESET_AT, "where the log ended when a group was reset or deleted last"),
    ("changes", progress.HEADER_CHANGES, "words stored since the file was made"),
    ("saved_changes", progress.HEADER_SAVED_CHANGES, "those among them that consumerOffset.json has"),
)
# Byte, size, meaning of a block's head.
_BLOCK_HEAD: Final = (
    ("crc", 0, 4, "of what follows, up to the names' end"),
    ("size", 4, 4, "of the block, a multiple of 64"),
    ("first_queue", 8, 4, "queue id of the first word"),
    ("queues", 12, 4, "number of words"),
    ("group_size", 16, 2, "bytes of the group's name"),
    ("topic_size", 18, 2, "bytes of the topic's name"),
)
_NAMES_AT: Final = 24
_ENTRY_FIELDS: Final = (
    ("count", error_log.COUNT, "how often; 0 = free"),
    ("first_ms", error_log.FIRST_MS, "when first"),
    ("last_ms", error_log.LAST_MS, "when last"),
    ("text_size", error_log.TEXT_SIZE, "bytes of the text"),
)


def word_at(data: bytes, at: int, size: int = WORD_SIZE, *, signed: bool = True) -> int:
    """A native-endian number."""
    return int.from_bytes(data[at : at + size], "little", signed=signed)


# Progress


def blocks(data: bytes) -> Iterator[tuple[int, progress.Block]]:
    """Each block with where it begins."""
    at, end = progress.HEADER_SIZE, min(used_end(data), len(data))
    while (block := progress.decode_block(data, at, end)) is not None:
        yield at, block
        at = block.end


def used_end(data: bytes) -> int:
    """Bytes of the file in use, as its header says."""
    return word_at(data, progress.HEADER_END * WORD_SIZE)


def progress_layout(data: bytes) -> Ranges:
    """The header's page, a block for each group and topic, free space."""
    yield Range(0, progress.HEADER_SIZE, "header", "sizes, fingerprints, counters")
    at = progress.HEADER_SIZE
    for start, block in blocks(data):
        queues = f"queues {block.first_queue:,} to {block.first_queue + block.queues - 1:,}"
        yield Range(start, block.end - start, "block", f"group {block.group}, topic {block.topic}, {queues}")
        at = block.end
    end = min(max(at, used_end(data)), len(data))
    if end > at:
        yield Range(at, end - at, "damage", "no block, though the header counts it")
    if len(data) > end:
        yield Range(end, len(data) - end, "free space", "for more groups and topics")


def progress_fields(data: bytes) -> Ranges:
    """Each word of the header, each field and word of the blocks."""
    for name, word, text in _PROGRESS_HEADER:
        yield Range(word * WORD_SIZE, WORD_SIZE, name, text, word_at(data, word * WORD_SIZE))
    for at, block in blocks(data):
        yield from _block_fields(data, at, block)
    yield from (part for part in progress_layout(data) if part.name in ("damage", "free space"))


def _block_fields(data: bytes, at: int, block: progress.Block) -> Ranges:
    for name, place, size, text in _BLOCK_HEAD:
        yield Range(at + place, size, name, text, word_at(data, at + place, size, signed=False))
    place = at + _NAMES_AT
    for name, value in (("group", block.group), ("topic", block.topic)):
        if size := len(value.encode()):
            yield Range(place, size, name, "", value)
            place += size
    state = block.state * WORD_SIZE
    yield Range(
        state, WORD_SIZE, "state", "bit 0: deleted; above: oldest epoch to come back with", word_at(data, state)
    )
    for number in range(block.queues):
        place = (block.first_offset + number) * WORD_SIZE
        text = "next offset to consume, plus one; 0 = nothing known"
        yield Range(place, WORD_SIZE, f"queue {block.first_queue + number}", text, word_at(data, place))


def progress_rows(data: bytes) -> Iterator[dict[str, Any]]:
    """Each queue of which something is known."""
    for _at, block in blocks(data):
        is_deleted = bool(word_at(data, block.state * WORD_SIZE) & progress.STATE_DELETED)
        for number in range(block.queues):
            word = word_at(data, (block.first_offset + number) * WORD_SIZE)
            if word:
                yield {
                    "group": block.group,
                    "topic": block.topic,
                    "queue_id": block.first_queue + number,
                    "next_offset": word - 1,
                    "deleted": is_deleted,
                }


# Errors


def error_layout(data: bytes) -> Ranges:
    """The header, then each owner's entries."""
    yield Range(0, error_log.HEADER_SIZE, "header", "magic and version")
    size = error_log.ENTRIES * error_log.ENTRY_SIZE
    for owner in error_log.OWNERS:
        used = sum(1 for row in error_rows(data) if row["owner"] == owner)
        text = f"{used} of {error_log.ENTRIES}, {error_log.ENTRY_SIZE} bytes each"
        yield Range(error_log.entry_offset(owner, 0), size, f"entries of {owner}", text)


def error_fields(data: bytes) -> Ranges:
    """Magic, version, and the fields of every entry that is used; free ones whole."""
    for name, word in (("magic", error_log.HEADER_MAGIC), ("version", error_log.HEADER_VERSION)):
        yield Range(word * WORD_SIZE, WORD_SIZE, name, "", word_at(data, word * WORD_SIZE))
    for owner in error_log.OWNERS:
        for number in range(error_log.ENTRIES):
            yield from _entry_fields(data, owner, number)


def _entry_fields(data: bytes, owner: str, number: int) -> Ranges:
    at = error_log.entry_offset(owner, number)
    if word_at(data, at) <= 0:
        yield Range(at, error_log.ENTRY_SIZE, "free entry", f"number {number} of {owner}")
        return
    for name, word, text in _ENTRY_FIELDS:
        yield Range(at + word * WORD_SIZE, WORD_SIZE, name, text, word_at(data, at + word * WORD_SIZE))
    if found := _text_of(data, at):
        yield Range(at + error_log.TEXT_AT, len(found), "text", f"of {owner}", found.decode("utf-8", "replace"))


def _text_of(data: bytes, at: int) -> bytes:
    size = min(max(word_at(data, at + error_log.TEXT_SIZE * WORD_SIZE), 0), error_log.TEXT_BYTES_MAX)
    return data[at + error_log.TEXT_AT : at + error_log.TEXT_AT + size]


def error_rows(data: bytes) -> Iterator[dict[str, Any]]:
    """Each distinct error."""
    for owner in error_log.OWNERS:
        for number in range(error_log.ENTRIES):
            at = error_log.entry_offset(owner, number)
            if (count := word_at(data, at)) > 0:
                yield {
                    "offset": at,
                    "owner": owner,
                    "count": count,
                    "first_ms": word_at(data, at + error_log.FIRST_MS * WORD_SIZE),
                    "last_ms": word_at(data, at + error_log.LAST_MS * WORD_SIZE),
                    "text": _text_of(data, at).decode("utf-8", "replace"),
                }
