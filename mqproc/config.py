"""Every option: name, default, unit, bounds, meaning; and the places that it can come from.

Names are RocketMQ's in snake_case where RocketMQ has the option; sizes are bytes, as a number or as text with a unit
(`64KiB`), times carry their unit or are
RocketMQ's own (`flush_interval_commit_log` is ms, `file_reserved_time` hours). Precedence, highest first:

    --set NAME=VALUE  >  environment MQPROC_<NAME>  >  TOML file or broker.conf  >  default
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqproc import broker_conf
from mqproc.delay_levels import DELAY_LEVELS, DELAYS, delays_ms_of
from mqproc.errors import ConfigurationError
from mqproc.quantities import parse_size

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
SLOT_MESSAGES_MAX = (1 << 31) - 1
PAGE_BYTES = 4096
# The page cache has no larger pages.
LARGE_PAGE_BYTES = 2 * MIB
ENVIRONMENT_PREFIX = "MQPROC_"
# What is heard in the environment besides options: where store and file lie, and where tests want a group to fail.
OTHER_VARIABLES = ("MQPROC_STORE", "MQPROC_CONFIG", "MQPROC_CRASH", "MQPROC_FAULT", "MQPROC_HANG")


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
_TYPES: dict[str, type] = {name: type(option.default) for name, option in FIELDS.items()}


def rocketmq_name(name: str) -> str:
    """The option's spelling in a RocketMQ `broker.conf`."""
    special: str = FIELDS[name].metadata["rocketmq"]
    head, *rest = name.split("_")
    return special or head + "".join(word.capitalize() for word in rest)


_BY_ROCKETMQ_NAME = {rocketmq_name(name): name for name in FIELDS}


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it was said: `default`, a file's path, an environment variable, or `--set`."""

    value: Any
    source: str


def parse_option(name: str, value: Any, source: str) -> Any:
    """`value` (text, or what TOML gave) as the option's type, within its bounds.

    Raises ConfigurationError naming option, value, allowed range and source.
    """
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"{source}: no option is called {name!r}{hint}")
    return _in_bounds(name, _converted(name, value, source), source)


def _converted(name: str, value: Any, source: str) -> Any:
    kind = _TYPES[name]
    if kind is bool:
        return _as_bool(name, value, source)
    if kind is int:
        return _as_int(name, value, source)
    if issubclass(kind, enum.StrEnum):
        try:
            return kind(str(value))
        except ValueError:
            allowed = ", ".join(member.value for member in kind)
            raise ConfigurationError(f"{source}: {name} = {value!r} is none of {allowed}") from None
    return str(value)


def _as_int(name: str, value: Any, source: str) -> int:
    """A whole number; a text may also be a size with its unit where the option is one in bytes."""
    if not isinstance(value, bool) and re.fullmatch(r"[+-]?\d[\d_]*", str(value).strip()):
        return int(value)
    if not isinstance(value, str) or FIELDS[name].metadata["unit"] != "bytes":
        raise ConfigurationError(f"{source}: {name} = {value!r} is not a whole number")
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigurationError(f"{source}: {name}: {error}") from None


def _as_bool(name: str, value: Any, source: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    found = words.get(str(value).strip().lower())
    if found is None:
        raise ConfigurationError(f"{source}: {name} = {value!r} is neither true nor false")
    return found


def _in_bounds(name: str, value: Any, source: str) -> Any:
    low, high = FIELDS[name].metadata["low"], FIELDS[name].metadata["high"]
    if (low is not None and value < low) or (high is not None and value > high):
        unit = FIELDS[name].metadata["unit"]
        least = f"from {low:,} " if low is not None else ""
        most = f"to {high:,} " if high is not None else ""
        raise ConfigurationError(f"{source}: {name} = {value:,} is out of range: {least}{most}{unit}".rstrip())
    return value


def read_toml(path: Path) -> dict[str, Setting]:
    """Options of a TOML file: top level, or a table `[mqproc]`. Unknown names are errors."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return {
        name: Setting(parse_option(name, value, str(path)), str(path))
        for name, value in options_table(found, path).items()
        if name != "store"
    }


def options_table(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """Where a TOML file has its options: in a table `[mqproc]`, or at its top level. Raises ConfigurationError."""
    table = found.get("mqproc", found)
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: mqproc = {table!r} is not a table: options stand below [mqproc], or alone")
    if table is not found and (outside := found.keys() & {*FIELDS, "store"}):
        raise ConfigurationError(f"{path}: {min(outside)} stands above [mqproc]: options stand below it, or alone")
    return table


def read_broker_conf(path: Path) -> dict[str, Setting]:
    """Options of a RocketMQ `broker.conf` that we have too; the others are RocketMQ's own affair, unless misspelt."""
    lines = broker_conf.read_lines(path)
    broker_conf.check_spelling(path, lines, _BY_ROCKETMQ_NAME)
    pairs = {line.name: line.value for line in lines}
    _check_log_paths(pairs, path)
    return {
        name: Setting(parse_option(name, value, str(path)), str(path))
        for key, value in pairs.items()
        if (name := _BY_ROCKETMQ_NAME.get(key))
    }


def names_passed_over(config_file: Path | None) -> list[str]:
    """The names of a `broker.conf` that are none of ours; a TOML file may have none. Raises ConfigurationError."""
    if config_file is None or config_file.suffix == ".toml":
        return []
    return broker_conf.check_spelling(config_file, broker_conf.read_lines(config_file), _BY_ROCKETMQ_NAME)


def _check_log_paths(pairs: Mapping[str, str], path: Path) -> None:
    """Segments that lie elsewhere than in the store's own folder would be taken for lost ones."""
    log = Path(pairs.get("storePathCommitLog") or "commitlog")
    root = Path(pairs.get("storePathRootDir") or log.parent)
    if log.name != "commitlog" or log.parent not in (root, Path()) or "," in str(log):
        raise ConfigurationError(f"{path}: storePathCommitLog = {log}: the log can only be {root / 'commitlog'}")
    if others := pairs.get("readOnlyCommitLogStorePaths"):
        raise ConfigurationError(f"{path}: readOnlyCommitLogStorePaths = {others}: the log can only be in one folder")


def read_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    """Options given as MQPROC_<NAME>. Others are passed over: `environment.environment_warnings` tells of them."""
    settings = {}
    for name in FIELDS:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environment and not is_of_service(variable, environment):
            settings[name] = Setting(parse_option(name, environment[variable], variable), variable)
    return settings


def is_of_service(variable: str, environment: Mapping[str, str]) -> bool:
    """Whether Kubernetes has set it: MQPROC_METRICS_PORT=tcp://…, for a service that is called mqproc-metrics."""
    return variable.endswith("_PORT") and "://" in environment[variable]


def read_flags(flags: Iterable[str], source: str = "--set") -> dict[str, Setting]:
    """Options given as NAME=VALUE, by `--set` or by what else `source` names."""
    settings = {}
    for flag in flags:
        name, separator, value = flag.partition("=")
        if not separator:
            raise ConfigurationError(f"{source} {flag}: expected NAME=VALUE")
        name = _BY_ROCKETMQ_NAME.get(name.strip(), name.strip())
        settings[name] = Setting(parse_option(name, value, source), source)
    return settings


def load_settings(
    config_file: Path | None = None,
    flags: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> dict[str, Setting]:
    """Every option with its value and source."""
    settings = {name: Setting(option.default, "default") for name, option in FIELDS.items()}
    if config_file is not None:
        settings |= read_toml(config_file) if config_file.suffix == ".toml" else read_broker_conf(config_file)
    settings |= read_environment(os.environ if environment is None else environment)
    settings |= read_flags(flags)
    return settings


def delete_hours(text: str) -> frozenset[int]:
    """The hours that `delete_when` names. Raises ConfigurationError."""
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if not parts or any(not re.fullmatch(r"[01]?[0-9]|2[0-3]", part) for part in parts):
        raise ConfigurationError(f"delete_when = {text!r} is out of range: hours from 0 to 23, separated by ';'")
    return frozenset(map(int, parts))


def cpu_numbers(text: str) -> frozenset[int]:
    """The processors that a list like "0,2-3" names, as the kernel writes them. Raises ConfigurationError."""
    found: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        bounds = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if first > last:
            raise ConfigurationError(f"writer_cpus = {text!r}: {part!r} is neither a processor's number nor a range")
        found.update(range(first, last + 1))
    return frozenset(found)


def check_together(options: Options) -> None:
    """Combinations that cannot work. Raises ConfigurationError."""
    segment = options.mapped_file_size_commit_log
    if segment % PAGE_BYTES:
        bounds = FIELDS["mapped_file_size_commit_log"].metadata
        raise ConfigurationError(
            f"mapped_file_size_commit_log = {segment:,} is out of range: "
            f"from {bounds['low']:,} to {bounds['high']:,} bytes, in whole pages of {PAGE_BYTES:,}"
        )
    try:
        ipaddress.ip_address(options.broker_ip)
    except ValueError:
        raise ConfigurationError(f"broker_ip = {options.broker_ip!r} is no IP address: records have no names") from None
    for name in ("broker_name", "metrics_host"):
        text = getattr(options, name)
        if not text.isprintable():  # As bytes that are no UTF-8, which the environment may have.
            raise ConfigurationError(f"{name} = {text!r} is no text that can be printed")
    if " " in options.broker_name:
        raise ConfigurationError(f"broker_name = {options.broker_name!r} has a space: handles have it between spaces")
    delete_hours(options.delete_when)
    cpu_numbers(options.writer_cpus)
    delays_ms_of(options.message_delay_level)
    if options.max_pull_bytes > options.max_frame_bytes:
        raise ConfigurationError(
            f"max_pull_bytes = {options.max_pull_bytes:,} exceeds max_frame_bytes = {options.max_frame_bytes:,}"
        )


def options_from(settings: Mapping[str, Setting]) -> Options:
    """The options as one checked object."""
    options = Options(**{name: setting.value for name, setting in settings.items()})
    try:
        check_together(options)
    except ConfigurationError as error:
        named = set(re.findall(r"\w+", str(error))) & settings.keys()
        sources = sorted({settings[name].source for name in named} - {"default"})
        raise ConfigurationError(f"{' and '.join(sources)}: {error}" if sources else str(error)) from None
    return options


def load_options(
    config_file: Path | None = None, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Options:
    """Options from all sources, checked. Raises ConfigurationError."""
    return options_from(load_settings(config_file, flags, environment))
