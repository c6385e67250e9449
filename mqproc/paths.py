"""Paths of all files in a store.

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

from mqproc.errors import BadRequestError, StoreAccessError

SEGMENT_NAME_DIGITS = 20
# Larger offsets do not fit into 64 bits, although 20 digits can express them.
SEGMENT_START_LIMIT = 1 << 62
INDEX_NAME_DIGITS = 17
# Parsing dates is slow, and the same names are parsed repeatedly.
INDEX_NAMES_KEPT = 4_096


def segment_name(start_offset: int) -> str:
    """File name of the segment that begins at byte `start_offset`."""
    return f"{start_offset:0{SEGMENT_NAME_DIGITS}d}"


def segment_start(name: str) -> int | None:
    """The offset in a segment's name, or None for other names."""
    if len(name) != SEGMENT_NAME_DIGITS or not (name.isascii() and name.isdigit()):
        return None
    start = int(name)
    return start if start < SEGMENT_START_LIMIT else None


def index_name(time_ms: int) -> str:
    """Name of an index file by its creation time: local time as yyyyMMddHHmmssSSS."""
    moment = datetime.datetime.fromtimestamp(time_ms // 1000)
    return f"{moment:%Y%m%d%H%M%S}{time_ms % 1000:03d}"


@functools.lru_cache(INDEX_NAMES_KEPT)
def index_name_time_ms(name: str) -> int | None:
    """The time in an index file's name, or None for other names."""
    if len(name) != INDEX_NAME_DIGITS or not (name.isascii() and name.isdigit()):
        return None
    try:
        moment = datetime.datetime.strptime(name[:14], "%Y%m%d%H%M%S")
    except ValueError:
        return None
    return int(moment.timestamp()) * 1000 + int(name[14:])


def file_type(path: Path) -> int:
    """File type of the path's target as `stat.S_IFMT`; 0 when it does not exist.

    Raises OSError otherwise; Python's `exists` and `is_dir` return False for any error from 3.14 on.
    """
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def existing_folder(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    while not os.path.isdir(folder):
        folder = folder.parent
    return folder


def owner_of_files(root: Path) -> int:
    """User of all files in the store at `root`: this user; for the superuser the folder's owner."""
    user = os.geteuid()
    return user if user else root.stat().st_uid


def is_deleted_on_nfs(name: str) -> bool:
    """Whether NFS gave this name to a file that was deleted while a program had it open."""
    return name.startswith(".nfs")


def is_text(name: str) -> bool:
    """Whether a file name is UTF-8; invalid bytes appear as surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def checked_path(path: str | os.PathLike[str], name: str = "the store's path") -> Path:
    """Check a path given by a caller, of the store by default. Raises BadRequestError."""
    try:
        text = str.__str__(os.fspath(path))  # The `str` of an enum member may be its name.
        if "\0" in text:
            raise BadRequestError(f"{name} {text[:64]!r} is not a path: it contains byte 0")
        if os.fsencode(text):  # Raises for lone surrogates.
            return Path(text).expanduser().absolute()
    except UnicodeEncodeError as error:
        raise BadRequestError(f"{name} {text[:64]!r} is not a path: {error}") from None
    except TypeError:
        raise BadRequestError(f"{name} is {repr(path)[:64]}, which is not a path") from None
    except RuntimeError as error:  # Unknown user, or one without home.
        raise BadRequestError(f"{name} {text[:64]!r}: {error}") from None
    except FileNotFoundError:
        raise BadRequestError(f"{name} {text[:64]!r} is relative to the current folder, which was deleted") from None
    raise BadRequestError(f"{name} is empty")


def dangling_link(path: Path) -> str:
    """Text about a dangling symlink, the path itself or a folder above it; else "".

    Raises OSError as `file_type`.
    """
    if file_type(path):
        return ""
    for link in (path, *path.parents):
        if link.is_symlink() and not file_type(link):
            text = f"a symlink to {os.path.realpath(link)}, which does not exist"
            return text if link == path else f"{printable_path(link)} is {text}"
    return ""


_STORE_NAMES: Final = ("commitlog", "consumequeue", "index", "config", "checkpoint", "abort", "mqproc")
_IGNORED_NAMES: Final = frozenset({"lost+found", "mqproc.toml", "broker.conf", "lock"})


def check_may_be_store(paths: StorePaths) -> None:
    """Raise StoreAccessError for a folder that has other files and no store."""
    try:
        names = set(os.listdir(paths.root)) - _IGNORED_NAMES
    except OSError:  # Missing or not permitted: reported elsewhere.
        return
    if names and names.isdisjoint(_STORE_NAMES):
        raise StoreAccessError(
            f"{paths.root}: not a store, and not empty: it has no folder commitlog, but {min(names)!r}; name the "
            "store's folder, or a new one"
        )


def shell_quoted(path: Path) -> str:
    """A path quoted for the shell, for commands in messages."""
    return shlex.quote(os.fspath(path))


def printable_path(path: Path) -> str:
    """A printable path: bytes that are not UTF-8 appear as \\xNN."""
    return os.fsencode(path).decode(errors="backslashreplace")


SOCKETS: Final = ("writer", "query", "ctl")


def _below(folder: str, name: str = "") -> functools.cached_property[Path]:
    """A path below the store's root, built once."""
    return functools.cached_property(lambda paths: paths.root / folder / name)


@dataclass(frozen=True)
class StorePaths:
    """Paths of a store's files. `root` need not exist."""

    root: Path

    commit_log = _below("commitlog")
    guard = _below("commitlog", "~mqproc-is-running")
    """Exists while a group runs; sorted after all segments. See `store.compat`."""
    consume_queue = _below("consumequeue")
    index = _below("index")
    checkpoint = _below("checkpoint")
    abort = _below("abort")
    lock = _below("lock")
    timer_wheel = _below("timerwheel")
    timer_log = _below("timerlog")

    config = _below("config")
    topics = _below("config", "topics.json")
    deleted_topics = _below("config", "deletedTopics.json")
    """mqproc's own, but beside RocketMQ's files: it must outlive `mqproc/`."""
    timer_check = _below("config", "timercheck")
    delay_offsets = _below("config", "delayOffset.json")
    consumer_offsets = _below("config", "consumerOffset.json")
    subscription_groups = _below("config", "subscriptionGroup.json")

    own = _below("mqproc")
    topics_journal = _below("mqproc", "topics.journal")
    """Topic changes since topics.json was written."""
    control = _below("mqproc", "control")
    queues = _below("mqproc", "queues")
    next_queues = _below("mqproc", "queues.next")
    """Queue table under construction by recovery; it then replaces `queues`."""
    opened = _below("mqproc", "opened.json")
    """Identity of the lock file when mqproc last had the store."""
    quarantine = _below("mqproc", "aside")
    """Foreign files that were in place of the store's own."""
    repaired = _below("mqproc", "repaired")
    """Copies of everything that repairs changed, one folder each."""
    marks = _below("mqproc", "marks")
    damage = _below("mqproc", "damage.json")
    read_only = _below("mqproc", "read_only")
    next_segment = _below("mqproc", "segment.tmp")
    retention_report = _below("mqproc", "retention.json")
    """Result of the last retention pass, and messages deleted unconsumed."""
    progress = _below("mqproc", "progress")
    """Committed offsets of consumer groups, one word per queue."""
    unconsumed = _below("mqproc", "unconsumed.json")
    """Number of messages that retention deleted unconsumed, by group."""
    settings = _below("mqproc", "settings.json")
    """The group's options, for tools."""
    errors = _below("mqproc", "errors")
    """Distinct errors with count, first and last time."""
    log = _below("mqproc", "log.jsonl")
    kernels = _below("mqproc", "kernels")
    """Compiled kernels of a user without another folder for them."""
    spark_lock = _below("mqproc", "spark.lock")
    """Byte locks of tasks that write to the store."""
    spark_writes = _below("mqproc", "spark_writes")
    """Complete writes of Spark, by `writeId`."""
    usage_lock = _below("mqproc", "openers.lock")
    """Locked by users of a group started by `mqproc.open`."""

    def queue(self, topic: str, queue_id: int) -> Path:
        return self.consume_queue / topic / str(queue_id)

    def mark(self, name: str) -> Path:
        return self.marks / name

    def retention_request(self, name: str) -> Path:
        """A retention request, until the keeper has executed it."""
        return self.own / f"retention.request.{name}"

    def socket(self, name: str) -> Path:
        """`name` is one of SOCKETS."""
        return self.own / f"{name}.sock"
