"""Every option: name, default, unit, bounds, meaning; and the places that it can come from.

Names are RocketMQ's in snake_case where RocketMQ has the option; sizes are bytes, as a number or as text with a unit
(`64KiB`), times carry their unit or are
RocketMQ's own (`flush_interval_commit_log` is ms, `file_reserved_time` hours). Precedence, highest first:

    --set NAME=VALUE  >  environment MQPROC_<NAME>  >  TOML file or broker.conf  >  default
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any

from mqproc.util.units import DELAY_LEVELS, DELAYS, GIB, MIB, PAGE_BYTES

SLOT_MESSAGES_MAX = (1 << 31) - 1


class FlushDiskType(enum.StrEnum):
    """When a send is answered: after the write (async) or after the sync."""

    ASYNC_FLUSH = "ASYNC_FLUSH"
    SYNC_FLUSH = "SYNC_FLUSH"


class RetentionGuard(enum.StrEnum):
    """What retention keeps although it has expired."""

    NONE = "none"
    GROUPS = "groups"


class OnDamage(enum.StrEnum):
    """What to do about damage below the durable mark."""

    SERVE = "serve"
    READ_ONLY = "read_only"
    REFUSE = "refuse"


class LogFormat(enum.StrEnum):
    """How the processes of a group write their logs."""

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
) -> Any:
    """One option. `rocketmq` is its spelling in broker.conf where that is not the plain camelCase of the name."""
    metadata = {"doc": doc, "unit": unit, "low": low, "high": high, "rocketmq": rocketmq, "reload": reload}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Options:
    """All options with RocketMQ's defaults; `load_options` builds one from the sources."""

    # The log
    mapped_file_size_commit_log: int = _option(GIB, "size of a CommitLog segment", "bytes", PAGE_BYTES, 2 * GIB)
    max_message_size: int = _option(4 * MIB, "largest body", "bytes", 10, GIB, reload=True)
    enabled_append_prop_crc: bool = _option(
        True, "cover whole records with a CRC kept as their last property", rocketmq="enabledAppendPropCRC"
    )
    warm_mapped_file_enable: bool = _option(
        False, "write zeros to each page of a new segment before it is used", rocketmq="warmMapedFileEnable"
    )
    flush_disk_type: FlushDiskType = _option(
        FlushDiskType.ASYNC_FLUSH, "answer a send after the write (ASYNC_FLUSH) or after the sync (SYNC_FLUSH)"
    )
    flush_interval_commit_log: int = _option(500, "pause between two flushes of the log", "ms", 1, 60_000, reload=True)
    flush_commit_log_least_pages: int = _option(4, "dirty pages that make a flush worth it", "pages", 0, 1 << 20)
    flush_commit_log_thorough_interval: int = _option(
        10_000, "everything is flushed at least this often", "ms", 1, 3_600_000
    )
    broker_ip: str = _option("127.0.0.1", "address stored as each record's store host", rocketmq="brokerIP1")
    listen_port: int = _option(10911, "port stored as each record's store host", "", 0, 65535)
    broker_name: str = _option("mqproc", "name in what simple consumers have received; RocketMQ's broker must have it")

    # Queues
    mapped_file_size_consume_queue: int = _option(
        6_000_000, "size of a ConsumeQueue file, rounded up to whole 20-byte units", "bytes", 1, 2 * GIB
    )
    flush_interval_consume_queue: int = _option(1000, "pause between two ConsumeQueue flushes", "ms", 1, 60_000)
    flush_consume_queue_least_pages: int = _option(2, "dirty pages that make a flush worth it", "pages", 0, 1 << 20)
    flush_consume_queue_thorough_interval: int = _option(
        60_000, "everything is flushed at least this often", "ms", 1, 3_600_000
    )
    default_topic_queue_nums: int = _option(8, "queues of a topic made by its first send", "", 1, 65_535)
    auto_create_topic_enable: bool = _option(True, "make a topic at its first send")
    auto_create_subscription_group: bool = _option(True, "make a consumer group at its first use")
    max_queues: int = _option(65_536, "queues of the whole store", "", 16, 1 << 20)
    max_dispatch_behind_bytes: int = _option(
        4 * GIB, "sends are slowed from half of it on and refused above it", "bytes", MIB, 1 << 50
    )
    dedupe_window_messages: int = _option(
        0, "a message is not stored again while its unique id is among so many newest ones; 0: never looked at",
        "messages", 0, 1 << 24,
    )  # fmt: skip

    message_delay_level: str = _option(
        DELAYS, f"delays of the levels, RocketMQ's messageDelayLevel: up to {DELAY_LEVELS} numbers with s, m, h or d"
    )

    # Index
    message_index_enable: bool = _option(True, "index messages by key and unique id")
    message_index_safe: bool = _option(False, "count the index's own time when choosing where recovery begins")
    max_hash_slot_num: int = _option(5_000_000, "hash slots of an index file", "slots", 1, 1 << 29)
    max_index_num: int = _option(20_000_000, "entries of an index file, the unused entry 0 included", "", 2, 1 << 26)

    # Reading
    max_msgs_num_batch: int = _option(64, "most messages of one query by key", "messages", 1, 65_536)
    max_transfer_bytes_on_message_in_memory: int = _option(262_144, "most bytes of a RocketMQ-like pull", "bytes", 1)
    max_transfer_count_on_message_in_memory: int = _option(32, "most messages of a RocketMQ-like pull", "", 1)
    max_filter_message_size: int = _option(16_000, "ConsumeQueue bytes a filtered pull scans at least", "bytes", 20)
    max_pull_bytes: int = _option(8 * MIB, "most bytes of one pull's answer", "bytes", 4096, 64 * MIB)

    # Recovery
    on_damage: OnDamage = _option(OnDamage.SERVE, "with damage below the durable mark: serve, read_only or refuse")

    # Retention
    file_reserved_time: int = _option(
        72, "age at which a segment has expired and may be deleted", "hours", 0, 1 << 20, reload=True
    )
    delete_when: str = _option("04", "local hours at which expired segments are deleted, separated by ';'", reload=True)
    disk_max_used_space_ratio: int = _option(
        75, "above this use of the disk expired segments are deleted at any hour", "%", 1, 99, reload=True
    )
    disk_space_clean_forcibly_ratio: int = _option(
        85, "above this use of the disk the oldest segments are deleted whatever their age", "%", 1, 99, reload=True
    )
    disk_space_warning_level_ratio: int = _option(
        90, "above this use of the disk sends are refused", "%", 35, 99, reload=True
    )
    clean_file_forcibly_enable: bool = _option(
        True, "delete segments that have not expired when the disk fills", reload=True
    )
    retention_guard: RetentionGuard = _option(
        RetentionGuard.NONE, "keep what a consumer group has not consumed (groups), or not (none)", reload=True
    )
    clean_resource_interval: int = _option(
        10_000, "pause between two looks at what is due", "ms", 1, 3_600_000, reload=True
    )
    delete_file_batch_max: int = _option(10, "most segments deleted in one go", "", 1, 100_000, reload=True)
    delete_commit_log_files_interval: int = _option(
        100, "pause after each deleted segment", "ms", 0, 60_000, reload=True
    )
    delete_consume_queue_files_interval: int = _option(
        100, "pause after each queue that lost files", "ms", 0, 60_000, reload=True
    )

    # Messages that wait for their time
    timer_max_delay_sec: int = _option(259_200, "how far ahead a message may be delivered at a time", "s", 1, 1 << 31)
    timer_precision_ms: int = _option(1000, "width of a slot of the timer's wheel", "ms", 100, 60_000)

    timer_roll_window_slot: int = _option(
        172_800, "a message due later than so many slots is parked again in between", "slots", 2, 600_000
    )
    timer_congest_num_each_slot: int = _option(
        SLOT_MESSAGES_MAX, "messages that wait in one slot of the timer; sends for a fuller one are refused", "", 1,
        SLOT_MESSAGES_MAX,
    )  # fmt: skip
    mapped_file_size_timer_log: int = _option(100 * MIB, "size of a file of the timer's log", "bytes", 1024, GIB)

    # Transactions
    transaction_timeout: int = _option(
        6000, "age at which an open transaction's producer is first asked what became of it", "ms", 0, 86_400_000,
        rocketmq="transactionTimeOut",
    )  # fmt: skip
    transaction_check_interval: int = _option(30_000, "pause between two checks of a transaction", "ms", 10, 86_400_000)
    transaction_check_max: int = _option(
        15, "after so many checks an open transaction is given up: TRANS_CHECK_MAX_TIME_TOPIC has it", "", 1, 1 << 20
    )

    # Processes and sockets
    max_spin_us: int = _option(
        50,
        "after work, writer and query look this long for more before sleeping, and the dispatcher for a message that"
        " somebody waits for; longer than the pause between single sends it halves the time of each, and takes a"
        " processor",
        "µs",
        0,
        10_000,
    )
    writer_cpus: str = _option(
        "",
        "processors that the writer is kept on, such as 0 or 0,2-3 (empty: any). With clients kept on others, as by"
        " taskset, frames in a row come faster on few processors",
    )
    dispatcher_nice: int = _option(
        0, "how far dispatch stands back for writer and clients when processors are short, as nice does", "", 0, 19
    )
    cpu_latency_us: int = _option(
        -1,
        "while requests come, some hundred a second, processors wake within this time. 0 makes single messages faster,"
        " and costs power or the host of a virtual machine its processors; only root may ask for it (-1: 0 where it"
        " may, on a machine of at most 8 processors, while messages that consumers wait for come one by one, 500 a"
        " second or more; -2: never)",
        "µs",
        -2,
        10_000,
    )
    max_connections: int = _option(1024, "clients of one role", "", 1, 16_384)
    max_frame_bytes: int = _option(64 * MIB, "largest frame on a socket", "bytes", 4096, 1 << 30)
    frame_read_timeout_ms: int = _option(30_000, "a frame must arrive whole within this time", "ms", 100, 3_600_000)
    client_output_bytes: int = _option(
        128 * MIB, "answers waiting for a client that does not read, before it is let go", "bytes", 4096, 1 << 32
    )
    heartbeat_timeout_ms: int = _option(10_000, "a silent role is aborted after this time", "ms", 500, 3_600_000)
    busy_timeout_ms: int = _option(120_000, "a busy role is aborted after this time", "ms", 500, 1 << 31)
    log_format: LogFormat = _option(
        LogFormat.AUTO, "log lines for people (human), as JSON (json), or as JSON unless they go to a terminal (auto)"
    )
    metrics_port: int = _option(5557, "port of /metrics; 0 lets the system choose", "", 0, 65_535)
    metrics_host: str = _option("127.0.0.1", "address of /metrics")
    metrics_series_max: int = _option(
        5_000, "topics, and groups by topic, that have metrics of their own; others are added up", "", 1, 1 << 20
    )
    page_cache_behind_bytes: int = _option(
        128 * MIB,
        "let go of pages whose messages lie this far behind dispatch and flush: warm ones are reused; 0 keeps all",
        "bytes",
        0,
        1 << 50,
    )

    @property
    def consume_queue_file_bytes(self) -> int:
        """`mapped_file_size_consume_queue` in whole units, as RocketMQ rounds it."""
        return -(-self.mapped_file_size_consume_queue // 20) * 20

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
