"""The control file: every position, heartbeat and counter of a running group, a page a role.

    page 0  header        magic, version, epoch … (supervisor)
    page 1  supervisor    for each role: pid, incarnation, restarts
    page 2… one page for each role in ROLES order
    then    one page for each role with packed histograms and error counters: see `layout.histograms`

A word is a native-endian, aligned 8-byte integer in a cache line of its own; only the page's role stores to it. Magic
and version are stored last, so a reader that finds them finds everything before them. Tools can read the file of a
stopped group; it then has the last values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAGIC = 0x3130434F5250514D  # "MQPROC01", little-endian
VERSION = 4
PAGE_SIZE = 4096
LINE_SIZE = 64
WORD_SIZE = 8
WORDS_PER_LINE = LINE_SIZE // WORD_SIZE
WORDS_PER_PAGE = PAGE_SIZE // LINE_SIZE

SUPERVISOR = "supervisor"
WRITER = "writer"
COMMITLOG_FLUSHER = "commitlog-flusher"
DISPATCHER = "dispatcher"
CQ_FLUSHER = "cq-flusher"
INDEX_FLUSHER = "index-flusher"
QUERY = "query"
KEEPER = "keeper"
MONITOR = "monitor"
TEMPLATE = "template"

# In start order, except that the monitor starts first. Supervisor and template have no role page.
ROLES = (WRITER, COMMITLOG_FLUSHER, CQ_FLUSHER, INDEX_FLUSHER, DISPATCHER, QUERY, KEEPER, MONITOR)
_PAGES = ("header", SUPERVISOR, *ROLES)
HISTOGRAMS_START = len(_PAGES) * PAGE_SIZE
FILE_SIZE = HISTOGRAMS_START + len(ROLES) * PAGE_SIZE

# State word of a role.
STATE_NONE, STATE_STARTING, STATE_RUNNING, STATE_SYNCING, STATE_ALLOCATING, STATE_RECOVERING, STATE_STOPPING = range(7)
STATE_NAMES = ("none", "starting", "running", "syncing", "allocating", "recovering", "stopping")
BUSY_STATES = frozenset({STATE_STARTING, STATE_SYNCING, STATE_ALLOCATING, STATE_RECOVERING, STATE_STOPPING})

# States of a role kept by the supervisor, named as in supervisord. LENT is mqproc's: the role runs in a terminal
# (`mqproc run`) and is not supervised.
(STOPPED, STARTING, RUNNING, BACKOFF, STOPPING, EXITED, FATAL, LENT) = range(8)
SUPERVISED_NAMES = ("STOPPED", "STARTING", "RUNNING", "BACKOFF", "STOPPING", "EXITED", "FATAL", "LENT")

# State of the group, in the header.
GROUP_DOWN, GROUP_RECOVERING, GROUP_STARTING, GROUP_READY, GROUP_STOPPING = range(5)
GROUP_NAMES = ("down", "recovering", "starting", "ready", "stopping")

# Steps of recovery.
STEP_NONE, STEP_LOG, STEP_DISPATCH, STEP_DURABLE, STEP_KERNELS = range(5)
STEP_NAMES = ("nothing", "reading the log", "dispatching", "making it durable", "making kernels ready")


def name_of(value: int, names: Sequence[str]) -> str:
    """Name of a state; the number itself if out of range, since the file may be damaged."""
    return names[value] if 0 <= value < len(names) else str(value)


# Reasons for deleting segments, and for keeping expired segments.
(DUE_NOTHING, DUE_HOUR, DUE_DISK, DUE_FORCED, DUE_REQUEST) = range(5)
DUE_NAMES = ("nothing", "hour", "disk", "forced", "request")
(HELD_NOTHING, HELD_DISPATCH, HELD_LOG_MARK, HELD_QUEUE_MARK, HELD_INDEX_MARK) = range(5)
(HELD_GROUP, HELD_PROGRESS, HELD_SYNC, HELD_RECEIVED) = range(5, 9)
HELD_NAMES = (
    "nothing",
    "dispatch",
    "commitlog mark",
    "consumequeue mark",
    "index mark",
    "consumer group",
    "unreadable progress",
    "failed sync",
    "received messages",
)


@dataclass(frozen=True, slots=True)
class Word:
    """A word: index in an int64 view of the file, owner, unit and meaning."""

    name: str
    owner: str
    index: int
    unit: str
    help: str


WORDS: dict[str, Word] = {}
_used = dict.fromkeys(_PAGES, 0)


def _word(page: str, name: str, unit: str, help_text: str) -> int:
    line = _used[page]
    assert line < WORDS_PER_PAGE, f"page of {page} is full"
    assert name not in WORDS, name
    _used[page] = line + 1
    index = (_PAGES.index(page) * PAGE_SIZE + line * LINE_SIZE) // WORD_SIZE
    owner = SUPERVISOR if page == "header" else page
    WORDS[name] = Word(name, owner, index, unit, help_text)
    return index


# Header
HEADER_MAGIC = _word("header", "magic", "", "set last")
HEADER_VERSION = _word("header", "version", "", "version of this layout; set last but one")
EPOCH = _word("header", "epoch", "", "incremented at each start of a supervisor")
STORE_ID = _word("header", "store_id", "", "random id of the store's semaphores")
GROUP_STATE = _word("header", "group_state", "", "down, recovering, starting, ready, stopping")
SUPERVISOR_PID = _word("header", "supervisor_pid", "", "process id")
TEMPLATE_PID = _word("header", "template_pid", "", "process id")
GROUP_STARTED_MS = _word("header", "group_started_ms", "ms", "Unix time at which this supervisor started")
IDENTITY = (EPOCH, STORE_ID, GROUP_STARTED_MS)
"""Words that identify a group's run, also among stores at the same path."""
SUPERVISOR_HEARTBEAT_NS = _word("header", "supervisor_heartbeat_ns", "ns", "monotonic clock")
RECOVERY_US = _word("header", "recovery_us", "µs", "duration of the last recovery")
RECOVERY_CUT_BYTES = _word("header", "recovery_cut_bytes", "bytes", "torn tail removed by the last recovery")
DAMAGE_HOLES = _word("header", "damage_holes", "", "damaged ranges of the log that reads skip")
DAMAGE_READ_ONLY = _word("header", "damage_read_only", "", "1 if recovery found damage and on_damage is read_only")
SUPERVISOR_SYNC_ERRNO = _word(
    "header", "supervisor_sync_errno", "", "errno of an earlier run that made the store read-only"
)
RECOVERY_STEP = _word("header", "recovery_step", "", "current step of recovery")
RECOVERY_DONE = _word("header", "recovery_done", "bytes", "of the log processed by this step")
RECOVERY_EXTENT = _word("header", "recovery_extent", "bytes", "of the log to process in this step at most; 0 = none")
PID_NAMESPACE = _word("header", "pid_namespace", "", "inode of the namespace in which the process ids are valid")
CLEAN_START = _word("header", "clean_start", "", "1 if the run before, of mqproc or RocketMQ, stopped cleanly")
KERNELS_LEFT = _word("header", "kernels_left", "kernels", "to be compiled, first for the start, then in the background")
KERNELS_LEFT_MS = _word("header", "kernels_left_ms", "ms", "estimated time until they are compiled, 0 = not known")
KERNELS_FAILED = _word("header", "kernels_failed", "", "1 if the last compilation in the background failed")

_PER_ROLE = (
    ("pid", "", "process id, 0 if it does not run"),
    ("incarnation", "", "starts in this epoch"),
    ("restarts", "", "unexpected exits in this epoch"),
    ("supervised", "", "STOPPED, STARTING, RUNNING, BACKOFF, STOPPING, EXITED, FATAL, LENT"),
)
for _role in (*ROLES, TEMPLATE):
    for _name, _unit, _help in _PER_ROLE:
        _word(SUPERVISOR, f"{_role}.{_name}", _unit, _help)

# Problems that degrade a group, besides those of its roles: see `ipc.health`.
PROBLEMS = (
    "sync",
    "damage",
    "disk",
    "segment",
    "backlog",
    "dispatch",
    "commitlog-flush",
    "cq-flush",
    "index-flush",
    "retention",
    "delivery",
    "topics",
    "offsets",
    "offsets-lost",
    "settings-lost",
    "options",
    "maker",
    "metrics",
    *ROLES,
    TEMPLATE,
    "kernels",
)
PROBLEM_SINCE = {
    _name: _word(SUPERVISOR, f"{_name}.problem_since_ms", "ms", "Unix time at which this problem began, 0 = none")
    for _name in PROBLEMS
}

_COMMON = (
    ("heartbeat_ns", "ns", "monotonic clock, at least each second"),
    ("state", "", "starting, running, syncing, allocating, recovering, stopping"),
    ("state_since_ns", "ns", "monotonic clock"),
    ("sleeping", "", "1 while the role waits at its bell, 2 while only expedited requests wake it"),
    ("cycles", "", "iterations that did work"),
    ("errors", "", "logged errors"),
)
COMMON_NAMES = tuple(name for name, _, _ in _COMMON)
for _role in ROLES:
    for _name, _unit, _help in _COMMON:
        _word(_role, f"{_role}.{_name}", _unit, _help)


def role_word(role: str, name: str) -> int:
    """Index of a role's word in its own page or the supervisor's, such as "state", "pid"."""
    return WORDS[f"{role}.{name}"].index


# Writer
RESERVED_END = _word(WRITER, "reserved_end", "bytes", "the log may contain bytes up to here")
WRITTEN = _word(WRITER, "written", "bytes", "end of the last complete record, the limit of async readers")
WRITTEN_STORE_TIMESTAMP_MS = _word(WRITER, "written_store_timestamp_ms", "ms", "store time of the last record")
TABLE_AT = _word(WRITER, "table_at", "bytes", "next offsets in the queue table include records below this")
WRITER_SYNCED = _word(WRITER, "writer_synced", "bytes", "synced by the writer itself")
APPENDED_MESSAGES = _word(WRITER, "appended_messages", "messages", "since the group started")
APPENDED_FRAMES = _word(WRITER, "appended_frames", "frames", "since the group started")
APPEND_REJECTS = _word(WRITER, "append_rejects", "requests", "rejected with an error")
WRITER_CONNECTIONS = _word(WRITER, "writer_connections", "connections", "now")
WRITER_CLOCK_STEPS = _word(WRITER, "writer_clock_steps", "", "observed backward steps of the clock")
WRITER_SYNC_ERRNO = _word(WRITER, "writer_sync_errno", "", "errno of the first failed sync: the store is read-only")
WRITER_SEGMENT_WAITS = _word(WRITER, "writer_segment_waits", "", "segment rolls that waited for a preallocated segment")
WRITER_SYNCED_STORE_TIMESTAMP_MS = _word(
    WRITER, "writer_synced_store_timestamp_ms", "ms", "store time of the last synced record"
)
WRITER_SLOWED_MS = _word(WRITER, "writer_slowed_ms", "ms", "delay of appends because dispatch lags behind")
WRITTEN_NS = _word(WRITER, "written_ns", "ns", "monotonic clock when `written` was stored")
DROPPED_REPEATS = _word(WRITER, "dropped_repeats", "messages", "repeated messages dropped by their unique ids")
WRITER_SEGMENT_WAIT_US = _word(WRITER, "writer_segment_wait_us", "µs", "time spent waiting for segments")
WRITER_PARTIAL_FRAMES = _word(WRITER, "writer_partial_frames", "frames", "cut off by a disconnect of the client")
TIME_ORDERED_FROM = _word(WRITER, "time_ordered_from", "bytes", "store times ascend from this log position on")
TOPICS_ERRNO = _word(WRITER, "topics_errno", "", "errno of the last save of topics.json, 0 if it succeeded")

# CommitLog flusher
FLUSHER_SYNCED = _word(COMMITLOG_FLUSHER, "flusher_synced", "bytes", "synced by the flusher")
FLUSHER_SYNC_ERRNO = _word(COMMITLOG_FLUSHER, "flusher_sync_errno", "", "errno of the first failed sync")
SEGMENTS_READY_END = _word(COMMITLOG_FLUSHER, "segments_ready_end", "bytes", "allocated segments reach to here")
SEGMENT_ERRNO = _word(COMMITLOG_FLUSHER, "segment_errno", "", "errno of the last allocation, 0 if it succeeded")
COMMITLOG_SYNCS = _word(COMMITLOG_FLUSHER, "commitlog_syncs", "", "syncs done")
COMMITLOG_SYNC_US = _word(COMMITLOG_FLUSHER, "commitlog_sync_us", "µs", "spent in syncs")
COMMITLOG_SYNCED_NS = _word(COMMITLOG_FLUSHER, "commitlog_synced_ns", "ns", "monotonic clock at the last sync")
COMMITLOG_MARK = _word(COMMITLOG_FLUSHER, "commitlog_mark", "bytes", "durable mark of the log")
COMMITLOG_PASSES = _word(COMMITLOG_FLUSHER, "commitlog_passes", "", "passes done")
COMMITLOG_FORCED_PASSES = _word(COMMITLOG_FLUSHER, "commitlog_forced_passes", "", "passes that synced everything")
COMMITLOG_FORCED_NS = _word(COMMITLOG_FLUSHER, "commitlog_forced_ns", "ns", "monotonic clock at the last forced pass")
COMMITLOG_PASS_NS = _word(COMMITLOG_FLUSHER, "commitlog_pass_ns", "ns", "monotonic clock at the end of the last pass")
ALL_FLUSHED_NS = _word(COMMITLOG_FLUSHER, "all_flushed_ns", "ns", "monotonic clock when all of the log was durable")
COMMITLOG_FLUSH_ERRNO = _word(
    COMMITLOG_FLUSHER, "commitlog_flush_errno", "", "errno of the last pass, 0 if it succeeded"
)

# Dispatcher
DISPATCHED = _word(DISPATCHER, "dispatched", "bytes", "queues and index hold all records below this")
DISPATCHED_STORE_TIMESTAMP_MS = _word(
    DISPATCHER, "dispatched_store_timestamp_ms", "ms", "store time of the last dispatched record"
)
DISPATCHED_MESSAGES = _word(DISPATCHER, "dispatched_messages", "messages", "since the group started")
DISPATCHED_ENTRIES = _word(DISPATCHER, "dispatched_entries", "entries", "index entries since the group started")
DISPATCH_ERRNO = _word(DISPATCHER, "dispatch_errno", "", "errno that blocks dispatch now, 0 while it advances")
DISPATCH_HOLES = _word(DISPATCHER, "dispatch_holes", "", "damaged ranges of the log found by dispatch in this run")
DISPATCH_GAP_BYTES = _word(DISPATCHER, "dispatch_gap_bytes", "bytes", "log deleted before it was dispatched")
DISPATCH_READ_ONLY = _word(
    DISPATCHER, "dispatch_read_only", "", "1 if dispatch found damage and on_damage is read_only"
)
INDEX_FILE_MS = _word(DISPATCHER, "index_file_ms", "ms", "name of the newest index file as a time")
INDEX_ITEMS = _word(DISPATCHER, "index_items", "items", "count of the newest index file")
INDEX_FULL_FILES = _word(DISPATCHER, "index_full_files", "files", "index files filled since the group started")
# The last committed step in two slots; slot COMMIT_SEQUENCE & 1 is valid. A new dispatcher rolls the index back to it.
COMMIT_SEQUENCE = _word(DISPATCHER, "commit_sequence", "", "number of the last committed dispatch step")
COMMIT_DISPATCHED = tuple(_word(DISPATCHER, f"commit_dispatched_{n}", "bytes", "of a committed step") for n in (0, 1))
COMMIT_INDEX_MS = tuple(_word(DISPATCHER, f"commit_index_ms_{n}", "ms", "its index file's name") for n in (0, 1))
COMMIT_INDEX_ITEMS = tuple(_word(DISPATCHER, f"commit_index_items_{n}", "items", "its item count") for n in (0, 1))
COMMIT_INDEX_SLOTS = tuple(_word(DISPATCHER, f"commit_index_slots_{n}", "slots", "its slots used") for n in (0, 1))
COMMIT_INDEX_END_MS = tuple(_word(DISPATCHER, f"commit_index_end_ms_{n}", "ms", "its end time") for n in (0, 1))
COMMIT_INDEX_END = tuple(_word(DISPATCHER, f"commit_index_end_{n}", "bytes", "its end offset") for n in (0, 1))
COMMIT_MESSAGES = tuple(_word(DISPATCHER, f"commit_messages_{n}", "messages", "dispatched by then") for n in (0, 1))

# ConsumeQueue flusher
CQ_SYNCED = _word(CQ_FLUSHER, "cq_synced", "bytes", "log position up to which ConsumeQueues are synced")
CQ_SYNCS = _word(CQ_FLUSHER, "cq_syncs", "", "files synced")
CQ_PASSES = _word(CQ_FLUSHER, "cq_passes", "", "passes done")
CQ_FORCED_PASSES = _word(CQ_FLUSHER, "cq_forced_passes", "", "passes that synced everything")
CQ_FORCED_NS = _word(CQ_FLUSHER, "cq_forced_ns", "ns", "monotonic clock at the last forced pass")
CQ_SYNC_ERRNO = _word(CQ_FLUSHER, "cq_sync_errno", "", "errno of the first failed sync")
CQ_PASS_NS = _word(CQ_FLUSHER, "cq_pass_ns", "ns", "monotonic clock at the end of the last pass")
CQ_FLUSH_ERRNO = _word(CQ_FLUSHER, "cq_flush_errno", "", "errno of the last pass, 0 if it succeeded")

# Index flusher
INDEX_SYNCED = _word(INDEX_FLUSHER, "index_synced", "bytes", "log position up to which the index is synced")
INDEX_SYNCS = _word(INDEX_FLUSHER, "index_syncs", "", "files synced")
INDEX_PASSES = _word(INDEX_FLUSHER, "index_passes", "", "passes done")
INDEX_FORCED_PASSES = _word(INDEX_FLUSHER, "index_forced_passes", "", "passes that synced everything")
INDEX_FORCED_NS = _word(INDEX_FLUSHER, "index_forced_ns", "ns", "monotonic clock at the last forced pass")
INDEX_SYNC_ERRNO = _word(INDEX_FLUSHER, "index_sync_errno", "", "errno of the first failed sync")
INDEX_PASS_NS = _word(INDEX_FLUSHER, "index_pass_ns", "ns", "monotonic clock at the end of the last pass")
INDEX_FLUSH_ERRNO = _word(INDEX_FLUSHER, "index_flush_errno", "", "errno of the last pass, 0 if it succeeded")

# Query
QUERY_CONNECTIONS = _word(QUERY, "query_connections", "connections", "now")
QUERY_REQUESTS = _word(QUERY, "query_requests", "requests", "answered since the group started")
QUERY_REJECTS = _word(QUERY, "query_rejects", "requests", "answered with an error")
PULLED_MESSAGES = _word(QUERY, "pulled_messages", "messages", "handed out since the group started")
PULLED_BYTES = _word(QUERY, "pulled_bytes", "bytes", "handed out since the group started")
WAITING_PULLS = _word(QUERY, "waiting_pulls", "requests", "long polls held now")
QUERY_WAITING = _word(QUERY, "query_waiting", "requests", "accepted and not answered, except long polls")
PULLS = _word(QUERY, "pulls", "requests", "pulls answered since the group started")
EMPTY_PULLS = _word(QUERY, "empty_pulls", "requests", "pulls answered without a message")
KEY_QUERIES = _word(QUERY, "key_queries", "requests", "index lookups of a key")
KEY_FILES = _word(QUERY, "key_files", "files", "index files searched for a key")
KEY_ITEMS = _word(QUERY, "key_items", "items", "index entries examined for keys")
KEY_MATCHES = _word(QUERY, "key_matches", "items", "index entries with the hash and time of a key")
RETENTION_UNCONSUMED = _word(QUERY, "retention_unconsumed", "messages", "deleted before a group had consumed them")
PROGRESS_AT = _word(QUERY, "progress_at", "bytes", "minimum of the log to which committed offsets were raised")
QUERY_SYNC_ERRNO = _word(QUERY, "query_sync_errno", "", "errno of the first failed sync")
GROUP_MEMBERS = _word(QUERY, "group_members", "consumers", "current members of groups")
GROUP_REBALANCES = _word(QUERY, "group_rebalances", "", "reassignments of queues since the group started")
GROUP_COMMITS = _word(QUERY, "group_commits", "", "offsets committed since the group started")
GROUP_RETRIES = _word(QUERY, "group_retries", "messages", "sent to a retry topic since the group started")
GROUP_DEAD_LETTERS = _word(QUERY, "group_dead_letters", "messages", "sent to a dead-letter topic")
NACKS_FROM = _word(QUERY, "nacks_from", "bytes", "copies for unanswered nacks lie at or above this position")
RECEIVED_FROM = _word(QUERY, "received_from", "bytes", "unacknowledged received messages lie at or above this position")
OPEN_TRANSACTIONS = _word(QUERY, "open_transactions", "transactions", "neither committed nor rolled back")
OLDEST_TRANSACTION_MS = _word(
    QUERY, "oldest_transaction_ms", "ms", "born time of the oldest open transaction, 0 = none"
)
TRANSACTION_PRODUCERS = _word(QUERY, "transaction_producers", "producers", "waiting for a transaction check")
TRANSACTION_CHECKS = _word(
    QUERY, "transaction_checks", "", "copies stored for transaction checks since the group started"
)
TRANSACTION_COMMITS = _word(QUERY, "transaction_commits", "transactions", "committed since the group started")
TRANSACTION_ROLLBACKS = _word(QUERY, "transaction_rollbacks", "transactions", "rolled back since the group started")
TRANSACTION_DISCARDS = _word(QUERY, "transaction_discards", "transactions", "discarded since the group started")
QUERY_PARTIAL_FRAMES = _word(QUERY, "query_partial_frames", "frames", "cut off by a disconnect of the client")
OFFSETS_ERRNO = _word(QUERY, "offsets_errno", "", "errno of the last save of committed offsets, 0 if it succeeded")
OFFSETS_LOST = _word(QUERY, "offsets_lost", "", "1 if consumerOffset.json could not be read in this run")
GROUP_SETTINGS_LOST = _word(
    QUERY, "group_settings_lost", "", "1 if subscriptionGroup.json could not be read in this run"
)

# Keeper
MIN_PHYSICAL_OFFSET = _word(KEEPER, "min_physical_offset", "bytes", "first readable position of the log")
DISK_USED_BYTES = _word(KEEPER, "disk_used_bytes", "bytes", "of the file system that holds the store")
DISK_FREE_BYTES = _word(KEEPER, "disk_free_bytes", "bytes", "of the file system that holds the store")
DISK_FULL = _word(KEEPER, "disk_full", "", "1 while sends are rejected because the disk is nearly full")
KEEPER_SYNC_ERRNO = _word(KEEPER, "keeper_sync_errno", "", "errno of the first failed sync")
RETENTION_AIM = _word(KEEPER, "retention_aim", "bytes", "target of the log's minimum")
RETENTION_PASSES = _word(KEEPER, "retention_passes", "", "retention passes")
RETENTION_PASS_MS = _word(KEEPER, "retention_pass_ms", "ms", "Unix time of the last pass")
RETENTION_TRIGGER = _word(KEEPER, "retention_trigger", "", "reason for deleting segments in the last pass")
RETENTION_HELD_BY = _word(KEEPER, "retention_held_by", "", "reason for keeping expired segments")
RETENTION_SEGMENTS = _word(KEEPER, "retention_segments", "files", "CommitLog segments deleted")
RETENTION_QUEUE_FILES = _word(KEEPER, "retention_queue_files", "files", "ConsumeQueue files deleted")
RETENTION_INDEX_FILES = _word(KEEPER, "retention_index_files", "files", "index files deleted")
RETENTION_BYTES = _word(KEEPER, "retention_bytes", "bytes", "of all deleted files on disk")
RETENTION_PENDING_BYTES = _word(
    KEEPER, "retention_pending_bytes", "bytes", "of deleted files whose space is still in use"
)
RETENTION_ANSWERED = _word(KEEPER, "retention_answered", "requests", "manual requests that were executed")
RETENTION_ERRNO = _word(KEEPER, "retention_errno", "", "errno that ended the last pass early, 0 if none did")
OLDEST_STORE_TIMESTAMP_MS = _word(KEEPER, "oldest_store_timestamp_ms", "ms", "store time of the log's first record")
DELAYED_MESSAGES = _word(KEEPER, "delayed_messages", "messages", "waiting with a delay level")
TIMED_MESSAGES = _word(KEEPER, "timed_messages", "messages", "waiting with a delivery time")
DELIVERED_MESSAGES = _word(KEEPER, "delivered_messages", "messages", "delivered since the group started")
DELIVERIES_REFUSED = _word(KEEPER, "deliveries_refused", "frames", "rejected by the writer and retried")
DELIVERIES_LOST = _word(KEEPER, "deliveries_lost", "messages", "no longer in the log when due")
DELIVERY_LATE_MS = _word(KEEPER, "delivery_late_ms", "ms", "delay of the last batch of deliveries")
LEVEL_OFFSETS = tuple(
    _word(KEEPER, f"level_offset_{level}", "", f"next offset to deliver of delay level {level}")
    for level in range(1, 19)
)
DELIVERY_ERRNO = _word(KEEPER, "delivery_errno", "", "errno that blocks scheduled delivery now, 0 while it advances")

# Monitor
SCRAPES = _word(MONITOR, "scrapes", "requests", "of /metrics")
MONITOR_PORT = _word(MONITOR, "monitor_port", "", "TCP port of /metrics")


SYNC_ERRNO_WORDS = (
    WRITER_SYNC_ERRNO,
    FLUSHER_SYNC_ERRNO,
    CQ_SYNC_ERRNO,
    INDEX_SYNC_ERRNO,
    SUPERVISOR_SYNC_ERRNO,
    KEEPER_SYNC_ERRNO,
    QUERY_SYNC_ERRNO,
)
"""If one of them is set, the store is read-only for good."""

CLOSING_WORDS = (*SYNC_ERRNO_WORDS, DAMAGE_READ_ONLY, DISPATCH_READ_ONLY, DISK_FULL)
"""If one of them is set, appends are rejected."""


class Loads(Protocol):
    """Words of the file by index."""

    def __getitem__(self, index: int, /) -> int: ...


def sync_errno(words: Loads) -> int:
    """errno of a failed sync of any role, 0 if none failed."""
    return next(filter(None, map(words.__getitem__, SYNC_ERRNO_WORDS)), 0)
