"""Everything that is known of a running group, read at the moment it is asked for; nothing is counted twice.

    control file    words, histograms, counts by code        from_words
    log             the oldest message not dispatched        dispatch_lag
    errors          the supervisor's                         error_log
    queue table     topics                                   topics
    progress        consumer groups                          groups
    /proc           memory and processor time of each role   processes

Lag is the difference of two words read at one moment, or the age of a message; it survives the death of any role, and
is the same number that `mqproc stat` prints. Most cumulative words begin at 0 with each start of the group, which
Prometheus takes for a reset; the supervisor's errors go on.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mqproc.config.options import Options
from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.ipc.control import Control
from mqproc.layout import control as layout
from mqproc.layout import index_file
from mqproc.metrics.error_log import SeenError, seen_errors
from mqproc.metrics.exposition import Samples
from mqproc.metrics.from_words import samples_of_words
from mqproc.metrics.groups import GroupLag, GroupLags
from mqproc.metrics.health import dispatch_behind_ms, ready_problems_of
from mqproc.metrics.topics import TableFigures, TopicTable
from mqproc.paths import StorePaths
from mqproc.store.consumequeue.table import QueueTable
from mqproc.store.index.files import index_file_names

# --- processes ---
# What the kernel says of a process: memory, processor time, descriptors. Linux' /proc.


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """One process at one moment. `pss_bytes` counts a page that n processes share as 1/n, so it may be added up."""

    cpu_s: float
    lived_s: float
    resident_bytes: int
    pss_bytes: int
    open_fds: int

    @property
    def cpu_percent(self) -> float:
        """Of one processor, over the whole life."""
        return round(100 * self.cpu_s / self.lived_s, 1) if self.lived_s > 0 else 0.0


def figures_of(pid: int) -> ProcessFigures | None:
    """A process's figures; None when it is gone, or belongs to somebody else."""
    if pid <= 0:
        return None
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        with open("/proc/uptime") as uptime:
            up_s = float(uptime.read().split()[0])
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            pss = next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
        open_fds = len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, StopIteration):
        return None
    # After the name: state is field 3; utime and stime are 14 and 15, the start time 22, the resident pages 24.
    return ProcessFigures(
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        lived_s=round(up_s - int(fields[19]) / _TICKS_PER_S, 2),
        resident_bytes=int(fields[21]) * _PAGE_BYTES,
        pss_bytes=pss,
        open_fds=open_fds,
    )


TOLD_IN_RECOVERY: Final = frozenset(
    {
        "mqproc_up",
        "mqproc_build_info",
        "mqproc_group_ready",
        "mqproc_group_recovering",
        "mqproc_group_started_timestamp_seconds",
        "mqproc_role_up",
        "mqproc_role_heartbeat_timestamp_seconds",
        "mqproc_role_restarts_total",
        "mqproc_role_cycles_total",
        "mqproc_errors_total",
        "mqproc_process_cpu_seconds_total",
        "mqproc_process_resident_memory_bytes",
        "mqproc_process_proportional_memory_bytes",
        "mqproc_process_open_fds",
        "mqproc_scrapes_total",
    }
)
"""All else is known when recovery has ended. 0 would be wrong: a log's end that goes to 0 and back is a huge rate."""

PROCESSES_EVERY_S: Final = 2.0
"""What the kernel says of memory costs it a walk over the pages: it is asked at most this often."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A group at one moment."""

    words: Mapping[str, int]
    processes: Mapping[str, ProcessFigures]
    """By role; the supervisor and the template are among them."""
    table: TableFigures | None
    """None before recovery has made the queue table, which takes the place of the last run's."""
    lags: list[GroupLag]
    problems: list[str]
    """Why the group does not serve in full."""
    dispatch_behind_ms: int
    errors: list[SeenError]
    """Every distinct error, the one that came last first."""

    @property
    def recovers(self) -> bool:
        """Neither positions nor queues are known yet."""
        return self.words["group_state"] == layout.GROUP_RECOVERING

    @property
    def supervisor_errors(self) -> int:
        """How often something went wrong in the supervisor, which has no word for it: what the store's errors keep."""
        return sum(error.count for error in self.errors if error.owner == layout.SUPERVISOR)


class Collector:
    """Reads one group. `version` goes into the build's info; processes are asked for at most so often."""

    def __init__(
        self,
        control: Control,
        io: StoreIO,
        paths: StorePaths,
        options: Options,
        version: str,
        *,
        processes_every_s: float = PROCESSES_EVERY_S,
    ) -> None:
        self.control = control
        self._io = io
        self._paths = paths
        self.options = options
        self._version = version
        self._topics: TopicTable | None = None
        self._groups: GroupLags | None = None
        self._opened_in = layout.GROUP_DOWN
        self._processes: dict[str, ProcessFigures] = {}
        self._processes_due = 0.0
        self._processes_every_s = processes_every_s

    def picture(self) -> Picture:
        """The group now."""
        # The words first: a queue table that is a little newer contradicts nothing that follows from them.
        words = self.control.snapshot()
        # At once, too: a heartbeat is silent for no longer than it was when it was read.
        problems = ready_problems_of(words, self.options.heartbeat_timeout_ms * 1_000_000)
        self._take_table(words["group_state"])
        return Picture(
            words=words,
            processes=self._look_at_processes(words),
            table=self._topics.figures() if self._topics else None,
            lags=self._groups.figures() if self._groups else [],
            problems=problems,
            dispatch_behind_ms=dispatch_behind_ms(self._io, self._paths, words),
            errors=self._seen_errors(),
        )

    def samples(self) -> dict[str, Samples]:
        """Every metric's samples by its name; of a group that recovers only those that are known."""
        picture = self.picture()
        of_words = samples_of_words(
            self.control,
            self.options,
            picture.words,
            ready=not picture.problems,
            behind_ms=picture.dispatch_behind_ms,
        )
        of_words["mqproc_errors_total"] = [
            ((layout.SUPERVISOR,), picture.supervisor_errors),
            *of_words["mqproc_errors_total"],
        ]
        of_words |= _of_processes(picture.processes)
        of_words["mqproc_build_info"] = [((self._version, platform.python_version()), 1)]
        if picture.recovers:
            return {name: samples for name, samples in of_words.items() if name in TOLD_IN_RECOVERY}
        return {
            **of_words,
            **_of_topics(picture.table),
            **self._of_groups(picture.lags),
            **self._of_storage(picture),
        }

    def close(self) -> None:
        """Let go of the queue table; the control file is the caller's."""
        if self._topics is not None:
            self._topics.table.close()
            self._topics = self._groups = None

    def _seen_errors(self) -> list[SeenError]:
        try:
            return seen_errors(self._io, self._paths)
        except (OSError, CorruptStoreError):
            return []

    def _take_table(self, state: int) -> None:
        """The queue table of this run: a start makes another one, which takes the last run's place at its end."""
        started = self._opened_in == layout.GROUP_DOWN != state
        if state == layout.GROUP_RECOVERING or started:
            self.close()
        if state != layout.GROUP_RECOVERING and self._topics is None:
            self._opened_in = state
            self._open_table()

    def _open_table(self) -> None:
        try:
            table = QueueTable(self._io, self._paths.queues)
        except (FileNotFoundError, CorruptStoreError):
            return
        options = self.options
        self._topics = TopicTable(table, options.metrics_series_max, options.consume_queue_file_bytes)
        self._groups = GroupLags(self._io, self._paths, options, self.control.words, table)

    def _look_at_processes(self, words: Mapping[str, int]) -> dict[str, ProcessFigures]:
        now = time.monotonic()
        if now >= self._processes_due:
            self._processes_due = now + self._processes_every_s
            pids = {layout.SUPERVISOR: words["supervisor_pid"], layout.TEMPLATE: words["template_pid"]}
            pids |= {role: words[f"{role}.pid"] for role in layout.ROLES}
            found = {role: figures_of(pid) for role, pid in pids.items()}
            self._processes = {role: figures for role, figures in found.items() if figures is not None}
        return self._processes

    def _of_groups(self, every: list[GroupLag]) -> dict[str, Samples]:
        lags = self._groups.bounded(every, self.options.metrics_series_max) if self._groups else []
        return {
            "mqproc_consumer_groups": [((), len({lag.group for lag in every}))],
            "mqproc_consumer_lag_messages": [((lag.group, lag.topic), lag.messages) for lag in lags],
            "mqproc_consumer_lag_seconds": [
                ((lag.group, lag.topic), lag.seconds) for lag in lags if lag.seconds is not None
            ],
            "mqproc_messages_consumed_total": [((lag.group, lag.topic), lag.consumed) for lag in lags],
        }

    def _of_storage(self, picture: Picture) -> dict[str, Samples]:
        words, options = picture.words, self.options
        segment = options.mapped_file_size_commit_log
        begin = words["min_physical_offset"]
        slots, items = options.max_hash_slot_num, options.max_index_num
        index_files = len(index_file_names(self._io, self._paths.index))
        newest = index_file.item_offset(slots, max(words["index_items"], index_file.FIRST_ITEM))
        files = {
            "commitlog": -(-(words["segments_ready_end"] - begin // segment * segment) // segment),
            "consumequeue": picture.table.unit_files if picture.table else 0,
            "index": index_files,
        }
        sizes = {
            "commitlog": words["written"] - begin,
            "consumequeue": picture.table.unit_bytes if picture.table else 0,
            "index": (index_files - 1) * index_file.file_size(slots, items) + newest if index_files else 0,
        }
        return {
            "mqproc_storage_bytes": [((target,), max(0, size)) for target, size in sizes.items()],
            "mqproc_segments": [((target,), max(0, count)) for target, count in files.items()],
        }


def _of_processes(processes: Mapping[str, ProcessFigures]) -> dict[str, Samples]:
    return {
        "mqproc_process_cpu_seconds_total": [((role,), of.cpu_s) for role, of in processes.items()],
        "mqproc_process_resident_memory_bytes": [((role,), of.resident_bytes) for role, of in processes.items()],
        "mqproc_process_proportional_memory_bytes": [((role,), of.pss_bytes) for role, of in processes.items()],
        "mqproc_process_open_fds": [((role,), of.open_fds) for role, of in processes.items()],
    }


def _of_topics(table: TableFigures | None) -> dict[str, Samples]:
    if table is None:
        return {name: [((), 0)] for name in ("mqproc_topics", "mqproc_queues", "mqproc_queue_table_used_ratio")}
    # The labels' tuples are made once: there may be thousands.
    topics = [((of.topic,), of) for of in table.topics]
    return {
        "mqproc_topics": [((), table.topic_count)],
        "mqproc_queues": [((), table.queue_count)],
        "mqproc_queue_table_used_ratio": [((), table.used_ratio)],
        "mqproc_messages_appended_total": [(labels, of.appended) for labels, of in topics],
        "mqproc_messages_delivered_total": [(labels, of.delivered) for labels, of in topics],
        "mqproc_stored_messages": [(labels, of.stored) for labels, of in topics],
        "mqproc_last_message_timestamp_seconds": [(labels, of.last_store_timestamp_ms / 1000) for labels, of in topics],
    }
