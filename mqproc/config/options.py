"""The table of options: name, default, unit, bounds, meaning.

Names are RocketMQ's in snake_case where RocketMQ has the option. Sizes are bytes, as a number or as text with a unit
(`64KiB`); times name their unit or have RocketMQ's (`flush_interval_commit_log` is ms, `file_reserved_time` hours).
Precedence of sources, highest first:

    --set NAME=VALUE  >  environment MQPROC_<NAME>  >  TOML file or broker.conf  >  default

Few installations need the options of the last group, `expert`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from dataclasses import dataclass, field
from typing import Any, Final

from mqproc.util.units import DELAY_LEVELS, DELAYS, GIB, MIB, PAGE_BYTES

SLOT_MESSAGES_MAX = (1 << 31) - 1


class Profile(enum.StrEnum):
    """Sizes of a new store's files, unless they are set; an existing store keeps its sizes."""

    SERVER = "server"
    EMBEDDED = "embedded"


PROFILES: Final = {
    Profile.SERVER: {
        "mapped_file_size_commit_log": GIB,
        "max_hash_slot_num": 5_000_000,
        "max_index_num": 20_000_000,
    },
    Profile.EMBEDDED: {
        "mapped_file_size_commit_log": 64 * MIB,
        "max_hash_slot_num": 250_000,
        "max_index_num": 1_000_000,
    },
}


class FlushDiskType(enum.StrEnum):
    """Time of the answer to a send: after the write (async) or after the sync."""

    ASYNC_FLUSH = "ASYNC_FLUSH"
    SYNC_FLUSH = "SYNC_FLUSH"


class RetentionGuard(enum.StrEnum):
    """Expired messages that retention keeps; AUTO becomes one of the others at a start."""

    AUTO = "auto"
    NONE = "none"
    GROUPS = "groups"


class OnDamage(enum.StrEnum):
    """Reaction to damage below the durable mark."""

    SERVE = "serve"
    READ_ONLY = "read_only"
    REFUSE = "refuse"


class LogFormat(enum.StrEnum):
    """Format of a group's log lines."""

    AUTO = "auto"
    HUMAN = "human"
    JSON = "json"


def _option(
    default: Any,
    doc: str,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    rocketmq: str = "",
    reload: bool = False,
    expert: bool = False,
) -> Any:
    """One option. `rocketmq`: its spelling in broker.conf unless that is the camelCase name."""
    metadata = {"doc": doc, "unit": unit, "low": low, "high": high, "rocketmq": rocketmq, "reload": reload}
    metadata["expert"] = expert
    return field(default=default, metadata=metadata)


_expert = functools.partial(_option, expert=True)


@dataclass(frozen=True, slots=True)
class Options:
    """All options, by default RocketMQ's; `config.parse.load_options` reads the sources."""

    # The log
    profile: Profile = _option(
        Profile.SERVER,
        "file sizes of a new store where they are not set: server (1 GiB segments, index files of 20 million entries),"
        " as RocketMQ's, or embedded (64 MiB, 1 million), the default of mqproc.open",
    )
    mapped_file_size_commit_log: int = _option(GIB, "size of a CommitLog segment", "bytes", PAGE_BYTES, 2 * GIB)
    max_message_size: int = _option(4 * MIB, "largest body", "bytes", 10, GIB, reload=True)
    enabled_append_prop_crc: bool = _option(
        True, "store a CRC over the whole record as its last property", rocketmq="enabledAppendPropCRC"
    )
    flush_disk_type: FlushDiskType = _option(
        FlushDiskType.ASYNC_FLUSH, "answer a send after the write (ASYNC_FLUSH) or after the sync (SYNC_FLUSH)"
    )
    flush_interval_commit_log: int = _option(500, "pause between two flushes of the log", "ms", 1, 60_000, reload=True)
    flush_commit_log_least_pages: int = _option(4, "least dirty pages for a flush", "pages", 0, 1 << 20)
    flush_commit_log_thorough_interval: int = _option(
        10_000, "longest time between flushes of everything", "ms", 1, 3_600_000
    )
    broker_ip: str = _option("127.0.0.1", "address stored as each record's store host", rocketmq="brokerIP1")
    listen_port: int = _option(10911, "port stored as each record's store host", "", 0, 65535)
    broker_name: str = _option(
        "mqproc", "broker name in receipt handles of simple consumers, as configured in RocketMQ"
    )

    # Queues
    mapped_file_size_consume_queue: int = _option(
        6_000_000, "size of a ConsumeQueue file, rounded up to whole 20-byte units", "bytes", 1, 2 * GIB
    )
    flush_interval_consume_queue: int = _option(1000, "pause between two ConsumeQueue flushes", "ms", 1, 60_000)
    flush_consume_queue_least_pages: int = _option(2, "least dirty pages for a flush", "pages", 0, 1 << 20)
    flush_consume_queue_thorough_interval: int = _option(
        60_000, "longest time between flushes of everything", "ms", 1, 3_600_000
    )
    default_topic_queue_nums: int = _option(8, "queues of a topic created by its first send", "", 1, 65_535)
    auto_create_topic_enable: bool = _option(True, "create a topic at its first send")
    auto_create_subscription_group: bool = _option(True, "create a consumer group at its first use")
    max_queues: int = _option(65_536, "queues of the whole store", "", 16, 1 << 20)
    max_dispatch_behind_bytes: int = _option(
        4 * GIB,
        "back-pressure: sends are delayed above half of this backlog and refused above it",
        "bytes",
        MIB,
        1 << 50,
    )
    dedupe_window_messages: int = _option(
        0, "duplicates are dropped if their unique id is among this many newest messages; 0 disables it",
        "messages", 0, 1 << 24,
    )  # fmt: skip

    message_delay_level: str = _option(
        DELAYS, f"delays of the levels, RocketMQ's messageDelayLevel: up to {DELAY_LEVELS} numbers with s, m, h or d"
    )

    # Index
    message_index_enable: bool = _option(True, "index messages by key and unique id")
    message_index_tags: bool = _option(
        False, "index messages by tag, too, as RocketMQ does since 5.4; in an existing store its index decides"
    )
    max_hash_slot_num: int = _option(5_000_000, "hash slots of an index file", "slots", 1, 1 << 29)
    max_index_num: int = _option(20_000_000, "entries of an index file, the unused entry 0 included", "", 2, 1 << 26)

    # Reading
    max_msgs_num_batch: int = _option(64, "most messages of one query by key", "messages", 1, 65_536)
    max_transfer_bytes_on_message_in_memory: int = _option(262_144, "most bytes of a RocketMQ-like pull", "bytes", 1)
    max_transfer_count_on_message_in_memory: int = _option(32, "most messages of a RocketMQ-like pull", "", 1)
    max_pull_bytes: int = _option(8 * MIB, "most bytes of one pull's answer", "bytes", 4096, 64 * MIB)

    # Recovery
    on_damage: OnDamage = _option(
        OnDamage.SERVE, "reaction to damage below the durable mark: serve, read_only or refuse"
    )
    ignore_kvstore: bool = _option(
        False, "start on a store whose POP check points, transactions or timed messages RocketMQ keeps in RocksDB"
    )

    # Retention
    file_reserved_time: int = _option(72, "age at which a segment expires", "hours", 0, 1 << 20, reload=True)
    delete_when: str = _option("04", "local hours at which expired segments are deleted, separated by ';'", reload=True)
    disk_max_used_space_ratio: int = _option(
        75, "above this disk usage expired segments are deleted at any hour", "%", 1, 99, reload=True
    )
    disk_space_clean_forcibly_ratio: int = _option(
        85, "above this disk usage the oldest segments are deleted at any age", "%", 1, 99, reload=True
    )
    disk_space_warning_level_ratio: int = _option(
        90, "above this disk usage sends are refused", "%", 35, 99, reload=True
    )
    disk_floor_bytes: int = _option(
        512 * MIB,
        "sends are also refused while less than this plus two segments is free; 0: no such limit",
        "bytes", 0, 1 << 50, reload=True,
    )  # fmt: skip
    clean_file_forcibly_enable: bool = _option(True, "delete unexpired segments when the disk fills up", reload=True)
    retention_guard: RetentionGuard = _option(
        RetentionGuard.AUTO,
        "keep messages that a consumer group has not consumed (groups), or not (none); auto: none in a store that"
        " RocketMQ made, else groups",
        reload=True,
    )
    clean_resource_interval: int = _option(10_000, "pause between retention passes", "ms", 1, 3_600_000, reload=True)

    # Delayed messages
    timer_max_delay_sec: int = _option(259_200, "longest delay of a message with a delivery time", "s", 1, 1 << 31)
    timer_precision_ms: int = _option(1000, "width of a slot of the timer wheel", "ms", 100, 60_000)

    mapped_file_size_timer_log: int = _option(100 * MIB, "size of a timer log file", "bytes", 1024, GIB)

    # Transactions
    transaction_timeout: int = _option(
        6000, "age at which an open transaction is first checked", "ms", 0, 86_400_000,
        rocketmq="transactionTimeOut",
    )  # fmt: skip
    transaction_check_interval: int = _option(30_000, "pause between checks of a transaction", "ms", 10, 86_400_000)
    transaction_check_max: int = _option(
        15, "number of checks after which an open transaction is moved to TRANS_CHECK_MAX_TIME_TOPIC", "", 1, 1 << 20
    )

    # Processes and sockets
    max_connections: int = _option(1024, "clients of one role", "", 1, 16_384)
    max_frame_bytes: int = _option(64 * MIB, "largest frame on a socket", "bytes", 4096, 1 << 30)
    socket_group: str = _option(
        "", "group of users whose clients may use this group of processes: a name or number of /etc/group"
    )
    socket_mode: str = _option(
        "",
        "mode of the sockets for clients: 0600 (the owner), 0660 (and socket_group) or 0666 (every user); empty: 0660"
        " with socket_group, else 0600",
    )
    heartbeat_timeout_ms: int = _option(
        10_000, "a role without heartbeats is aborted after this time", "ms", 500, 3_600_000
    )
    busy_timeout_ms: int = _option(120_000, "a busy role is aborted after this time", "ms", 500, 1 << 31)
    log_format: LogFormat = _option(
        LogFormat.AUTO, "log lines for people (human), as JSON (json), or as JSON unless they go to a terminal (auto)"
    )
    metrics_port: int = _option(5557, "port of /metrics; 0 lets the system choose", "", 0, 65_535)
    metrics_host: str = _option("127.0.0.1", "address of /metrics")
    metrics_allowed_hosts: str = _option(
        "",
        "host names that clients may use for /metrics besides metrics_host, such as mq.example,mqproc; * allows all",
        reload=True,
    )
    metrics_series_max: int = _option(
        5_000, "topics, and groups by topic, with their own metrics; others are summed", "", 1, 1 << 20
    )

    # Expert
    warm_mapped_file_enable: bool = _expert(
        False, "write zeros to each page of a new segment before it is used", rocketmq="warmMapedFileEnable"
    )
    message_index_safe: bool = _expert(False, "consider the index's timestamp when choosing where recovery begins")
    max_filter_message_size: int = _expert(16_000, "least ConsumeQueue bytes that a filtered pull scans", "bytes", 20)
    delete_file_batch_max: int = _expert(10, "most segments deleted in one pass", "", 1, 100_000, reload=True)
    delete_commit_log_files_interval: int = _expert(
        100, "pause after each deleted segment", "ms", 0, 60_000, reload=True
    )
    delete_consume_queue_files_interval: int = _expert(
        100, "pause after each queue with deleted files", "ms", 0, 60_000, reload=True
    )
    timer_roll_window_slot: int = _expert(
        172_800, "a message due after more slots than this is rescheduled in between", "slots", 2, 600_000
    )
    timer_congest_num_each_slot: int = _expert(
        SLOT_MESSAGES_MAX,
        "most messages in one timer slot; sends for a full slot are refused",
        "",
        1,
        SLOT_MESSAGES_MAX,
    )
    max_spin_us: int = _expert(
        50,
        "busy-wait of writer and query after work, and of the dispatcher for a message with a waiting consumer; above"
        " the pause between single sends it halves their latency, and occupies a processor",
        "µs", 0, 10_000,
    )  # fmt: skip
    writer_cpus: str = _expert(
        "",
        "processor affinity of the writer, such as 0 or 0,2-3 (empty: any). With clients on other processors, as by"
        " taskset, consecutive frames are faster on few processors",
    )
    dispatcher_nice: int = _expert(0, "nice value of the dispatcher, in favour of writer and clients", "", 0, 19)
    cpu_latency_us: int = _expert(
        -2,
        "wake-up latency demanded of all processors, by /dev/cpu_dma_latency, while a hundred requests a second arrive;"
        " only root may do that. 0 makes single messages faster, and keeps the machine's processors awake, which"
        " costs power. Off by default (-2); -1: 0 on at most 8 processors, where it may, while 500 messages a second"
        " arrive for waiting consumers",
        "µs", -2, 10_000,
    )  # fmt: skip
    frame_read_timeout_ms: int = _expert(30_000, "longest time for a whole frame to arrive", "ms", 100, 3_600_000)
    client_output_bytes: int = _expert(
        128 * MIB, "unread answers queued for a client before it is disconnected", "bytes", 4096, 1 << 32
    )
    page_cache_behind_bytes: int = _expert(
        128 * MIB,
        "pages this far behind dispatch and flush are dropped from the page cache, so that warm pages are reused; 0"
        " keeps all",
        "bytes", 0, 1 << 50,
    )  # fmt: skip

    @property
    def consume_queue_file_bytes(self) -> int:
        """`mapped_file_size_consume_queue` in whole units, as RocketMQ rounds it."""
        return -(-self.mapped_file_size_consume_queue // 20) * 20

    def disk_refusal(self, used: int, free: int) -> str:
        """The reason to refuse sends at this disk usage, with the option; "" without one."""
        ratio, floor = self.disk_space_warning_level_ratio, self.disk_floor_bytes
        if 100 * used > ratio * (used + free):
            needed, option = (100 - ratio) * (used + free) // 100, f"disk_space_warning_level_ratio = {ratio}"
        else:
            needed = 2 * self.mapped_file_size_commit_log + floor
            option = f"disk_floor_bytes = {floor:,} and two segments"
            if not floor or free >= needed:
                return ""
        return f"{needed:,} bytes must be free, {free:,} are ({option})"

    @property
    def sync_flush(self) -> bool:
        return self.flush_disk_type is FlushDiskType.SYNC_FLUSH

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


FIELDS: dict[str, dataclasses.Field[Any]] = {option.name: option for option in dataclasses.fields(Options)}


def rocketmq_name(name: str) -> str:
    """The option's spelling in a RocketMQ `broker.conf`."""
    special: str = FIELDS[name].metadata["rocketmq"]
    head, *rest = name.split("_")
    return special or head + "".join(word.capitalize() for word in rest)
