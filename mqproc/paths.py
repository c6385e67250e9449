"""Where everything lies inside a store.

    <store>/commitlog/<20 digits>                      message records
    <store>/consumequeue/<topic>/<queue id>/<20 digits> 20-byte units
    <store>/index/<17 digits>                          hash index
    <store>/checkpoint  abort  lock  config/*.json     RocketMQ's markers and settings
    <store>/mqproc/                                    ours: positions, marks, sockets, logs

The names outside `mqproc/` are RocketMQ 5.3's.
"""

from __future__ import annotations

import datetime
import functools
import os
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqproc.errors import BadRequestError

SEGMENT_NAME_DIGITS = 20
# What lies further on would not fit into the 64 bits of an offset: 20 digits may say more.
SEGMENT_START_LIMIT = 1 << 62
INDEX_NAME_DIGITS = 17
# A calendar is slow, and a folder's names are asked again and again.
INDEX_NAMES_KEPT = 4_096


def segment_name(start_offset: int) -> str:
    """File name of the segment that begins at byte `start_offset` of its row."""
    return f"{start_offset:0{SEGMENT_NAME_DIGITS}d}"


def segment_start(name: str) -> int | None:
    """The offset that a segment's name tells, or None when it is no segment's name."""
    if len(name) != SEGMENT_NAME_DIGITS or not (name.isascii() and name.isdigit()):
        return None
    start = int(name)
    return start if start < SEGMENT_START_LIMIT else None


def index_name(time_ms: int) -> str:
    """Index file name for a creation time: local time as yyyyMMddHHmmssSSS, as RocketMQ's."""
    moment = datetime.datetime.fromtimestamp(time_ms // 1000)
    return f"{moment:%Y%m%d%H%M%S}{time_ms % 1000:03d}"


@functools.lru_cache(INDEX_NAMES_KEPT)
def index_name_time_ms(name: str) -> int | None:
    """The time that an index file's name tells, or None when it is no index file's name."""
    if len(name) != INDEX_NAME_DIGITS or not (name.isascii() and name.isdigit()):
        return None
    try:
        moment = datetime.datetime.strptime(name[:14], "%Y%m%d%H%M%S")
    except ValueError:
        return None
    return int(moment.timestamp()) * 1000 + int(name[14:])


def file_type(path: Path) -> int:
    """What the path leads to, as `stat.S_IFMT` tells it; 0 when nothing is there.

    Raises OSError when that cannot be told, where Python's own `exists` and `is_dir` say no from 3.14 on.
    """
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def is_text(name: str) -> bool:
    """Whether a file's name is UTF-8: one that is none has surrogates in the place of its bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def given_path(path: str | os.PathLike[str], name: str = "the store's path") -> Path:
    """The path that a caller gives, of a store or its socket by default. Raises BadRequestError for what is none."""
    try:
        text = os.fspath(path)
        if "\0" in text:
            raise BadRequestError(f"{name} {text[:64]!r} is no path: it has a byte 0")
        if os.fsencode(text):  # Raises for half of a character, which no file's name has.
            return Path(text).expanduser().absolute()
    except UnicodeEncodeError as error:
        raise BadRequestError(f"{name} {text[:64]!r} is no path: {error}") from None
    except TypeError:
        raise BadRequestError(f"{name} is {repr(path)[:64]}, which is no path") from None
    except RuntimeError as error:  # A user who has no home, or is none.
        raise BadRequestError(f"{name} {text[:64]!r}: {error}") from None
    raise BadRequestError(f"{name} is empty")


def lost_link(path: Path) -> str:
    """What is said of a symlink that leads to nothing, the path or a folder above it; "" of all else.

    Raises OSError as `file_type`.
    """
    if file_type(path):
        return ""
    for link in (path, *path.parents):
        if link.is_symlink() and not file_type(link):
            told = f"a symlink to {os.path.realpath(link)}, which is not there"
            return told if link == path else f"{shown(link)} is {told}"
    return ""


def in_shell(path: Path) -> str:
    """A path as a word of a command that is told to somebody, who may copy it."""
    return shlex.quote(os.fspath(path))


def shown(path: Path) -> str:
    """A path that can be written out: bytes that are no UTF-8 are told as \\xNN."""
    return os.fsencode(path).decode(errors="backslashreplace")


SOCKETS: Final = ("writer", "query", "ctl")


@dataclass(frozen=True)
class StorePaths:
    """The files of one store, by name. `root` need not exist."""

    root: Path

    @functools.cached_property
    def commit_log(self) -> Path:
        return self.root / "commitlog"

    @functools.cached_property
    def guard(self) -> Path:
        """There while a group runs; it sorts behind every segment. See `store.guard`."""
        return self.commit_log / "~mqproc-is-running"

    @functools.cached_property
    def consume_queue(self) -> Path:
        return self.root / "consumequeue"

    def queue(self, topic: str, queue_id: int) -> Path:
        return self.consume_queue / topic / str(queue_id)

    @functools.cached_property
    def index(self) -> Path:
        return self.root / "index"

    @functools.cached_property
    def checkpoint(self) -> Path:
        return self.root / "checkpoint"

    @functools.cached_property
    def abort(self) -> Path:
        return self.root / "abort"

    @functools.cached_property
    def lock(self) -> Path:
        return self.root / "lock"

    @functools.cached_property
    def config(self) -> Path:
        return self.root / "config"

    @functools.cached_property
    def topics(self) -> Path:
        return self.config / "topics.json"

    @functools.cached_property
    def deleted_topics(self) -> Path:
        """Ours, but beside RocketMQ's files: it must outlive `mqproc/`."""
        return self.config / "deletedTopics.json"

    @functools.cached_property
    def topics_journal(self) -> Path:
        """Changes of topics since topics.json was written."""
        return self.own / "topics.journal"

    @functools.cached_property
    def own(self) -> Path:
        return self.root / "mqproc"

    @functools.cached_property
    def control(self) -> Path:
        return self.own / "control"

    @functools.cached_property
    def queues(self) -> Path:
        return self.own / "queues"

    @functools.cached_property
    def next_queues(self) -> Path:
        """The queue table that recovery builds; it replaces `queues` when it is complete."""
        return self.own / "queues.next"

    @functools.cached_property
    def opened(self) -> Path:
        """Which lock file was ours when we had the store."""
        return self.own / "opened.json"

    @functools.cached_property
    def aside(self) -> Path:
        """What lay in the place of one of the store's files and was none."""
        return self.own / "aside"

    @functools.cached_property
    def repaired(self) -> Path:
        """Copies of what repairs have changed, a folder each."""
        return self.own / "repaired"

    @functools.cached_property
    def marks(self) -> Path:
        return self.own / "marks"

    def mark(self, name: str) -> Path:
        return self.marks / name

    @functools.cached_property
    def damage(self) -> Path:
        return self.own / "damage.json"

    @functools.cached_property
    def read_only(self) -> Path:
        return self.own / "read_only"

    @functools.cached_property
    def next_segment(self) -> Path:
        return self.own / "segment.tmp"

    def retention_request(self, name: str) -> Path:
        """What somebody asks of retention, until the keeper has carried it out."""
        return self.own / f"retention.request.{name}"

    @functools.cached_property
    def retention_report(self) -> Path:
        """What retention did last, and what went before groups had consumed it."""
        return self.own / "retention.json"

    @functools.cached_property
    def timer_wheel(self) -> Path:
        return self.root / "timerwheel"

    @functools.cached_property
    def timer_log(self) -> Path:
        return self.root / "timerlog"

    @functools.cached_property
    def timer_check(self) -> Path:
        return self.config / "timercheck"

    @functools.cached_property
    def delay_offsets(self) -> Path:
        return self.config / "delayOffset.json"

    @functools.cached_property
    def consumer_offsets(self) -> Path:
        return self.config / "consumerOffset.json"

    @functools.cached_property
    def subscription_groups(self) -> Path:
        return self.config / "subscriptionGroup.json"

    @functools.cached_property
    def progress(self) -> Path:
        """How far consumer groups have come, a word a queue."""
        return self.own / "progress"

    @functools.cached_property
    def unconsumed(self) -> Path:
        """How many messages retention has deleted before groups had consumed them."""
        return self.own / "unconsumed.json"

    @functools.cached_property
    def settings(self) -> Path:
        """TOML of the options that the group runs with, for tools."""
        return self.own / "settings.json"

    @functools.cached_property
    def errors(self) -> Path:
        """Distinct errors, with how often, first and last."""
        return self.own / "errors"

    @functools.cached_property
    def log(self) -> Path:
        return self.own / "log.jsonl"

    @functools.cached_property
    def spark_lock(self) -> Path:
        """Its bytes are locked by tasks that write to the store."""
        return self.own / "spark.lock"

    @functools.cached_property
    def openers(self) -> Path:
        """Locked by who uses a group that `mqproc.open` has started."""
        return self.own / "openers.lock"

    def socket(self, name: str) -> Path:
        """`name` is one of SOCKETS."""
        return self.own / f"{name}.sock"
