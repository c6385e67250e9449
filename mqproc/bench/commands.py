"""The commands of `mqproc bench` that measure a running group.

A command starts a group on a temporary store (or uses --store), runs clients in processes of their own, and prints a
line every five seconds, a summary like Kafka's, CPU and memory by role, and this machine's limits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import click

from mqproc.cli.options import SECONDS, SIZE, Command, CommandGroup, Invocation, RateRange, pass_invocation
from mqproc.cli.output import Output
from mqproc.errors import DiskFullError
from mqproc.util.units import format_bytes

# Parameters common to all benchmarks.
_PARAMETERS = frozenset(
    "messages size batch producers topics queues keys flush seconds warmup in_flight limits rate pin".split()
)
FLUSH = {"async": "ASYNC_FLUSH", "sync": "SYNC_FLUSH"}
# Loaded messages stay in the page cache; otherwise the first read would measure the disk.
_WARM = ("page_cache_behind_bytes=0",)
# A frozen role is silent, and must cause neither a restart nor back-pressure.
_FROZEN_SETTINGS = (
    "heartbeat_timeout_ms=3600000",
    "busy_timeout_ms=3600000",
    f"max_dispatch_behind_bytes={1 << 50}",
)
# Each idle consumer has two connections.
_IDLE_SETTINGS = ("max_connections=8192",)
# Nothing is deleted automatically, and anything can be deleted on request once it is written.
_RETENTION_SETTINGS = (
    "delete_when=4",
    "file_reserved_time=1000",
    "clean_file_forcibly_enable=false",
    "disk_max_used_space_ratio=99",
    "flush_consume_queue_thorough_interval=1000",
    "flush_commit_log_thorough_interval=1000",
)
_PINNED_NICE = 5
_MESSAGES = {
    "producers": "Stop after measuring this many messages; 0: after --seconds.",
    "consumers": "Messages to load first.",
    "clients": "Messages to load first.",
}
_LAZY = {
    "recovery": ("mqproc.bench.stores:recovery", "Start a store after a clean stop and after kill -9."),
    "rebuild": ("mqproc.bench.stores:rebuild", "Rebuild lost ConsumeQueues and index from the log."),
    "spark": ("mqproc.bench.spark:spark", "Read a store through Spark, beside the kernels alone."),
    "verify": ("mqproc.bench.stores:verify", "Verify a store, beside the rate at which its files can be read."),
}


@click.group(cls=CommandGroup, lazy=_LAZY)
def bench() -> None:
    """Measure this store against this machine's limits.

    Each command runs a group on a temporary store (in TMPDIR), unless --store names one; MQPROC_STORE is ignored.
    Bodies, keys and ids are fresh for every message, the warm-up is left out, percentiles are of all requests. Loaded
    messages are read from the page cache.
    """


def _option(name: str, default: Any, text: str, kind: Any) -> Callable[[Any], Any]:
    return click.option(name, type=kind, default=default, show_default=True, help=text)


def _common_options(messages: int, batch: int, producers: str, seconds: str = "5") -> list[Callable[[Any], Any]]:
    """Options that every benchmark has, with its own defaults."""
    positive = click.IntRange(1)
    names = tuple(dict.fromkeys((f"--{producers}", "--producers")))
    return [
        _option("--messages", messages, _MESSAGES[producers], click.IntRange(0)),
        _option("--size", "128", "Bytes of a body.", SIZE),
        _option("--batch", batch, "Messages a frame.", click.IntRange(1, 65536)),
        click.option(
            *names, "producers", type=click.IntRange(1, 256), default=1, show_default=True, help="Client processes."
        ),
        _option("--topics", 1, "Topics, in turns.", positive),
        _option("--queues", 8, "Queues of a topic.", positive),
        _option("--keys", 1, "Keys of a message.", click.IntRange(0)),
        _option("--flush", "async", "Answer after the write, or after the sync.", click.Choice(list(FLUSH))),
        _option("--seconds", seconds, "Measured time.", SECONDS),
        _option("--warmup", "1.5", "Warm-up before the measured time.", SECONDS),
        _option("--in-flight", 4, "Requests in flight; with --batch 1, messages in flight.", positive),
        click.option("--limits/--no-limits", default=True, show_default=True, help="Measure the machine's limits too."),
    ]


def _benchmark(
    name: str,
    text: str,
    shared: list[Callable[[Any], Any]],
    *options: Callable[[Any], Any],
    settings: Sequence[str] = (),
    own_group: str = "",
    sends_frames: bool = False,
) -> None:
    """Add the command of a benchmark in `cases`, which gets the values of `options`.

    `settings`: options of the group. `own_group`: why the benchmark cannot use the group of --store.
    """

    def command(invocation: Invocation, /, **given: Any) -> None:
        own = {key: given.pop(key) for key in given.keys() - _PARAMETERS}
        if own_group and invocation.store is not None:
            raise click.UsageError(f"bench {name} {own_group}: it needs its own group, without --store")
        if sends_frames and own.get("part") != "latency":
            _check_frames(given)
        idle = _IDLE_SETTINGS if own.get("idle") else ()
        _run(invocation, name, given, own, [*settings, *idle])

    made = pass_invocation(command)
    for option in reversed([*shared, *options]):
        made = option(made)
    bench.command(name, cls=Command, help=text)(made)


_rate = click.option("--rate", type=RateRange(0), default=0.0, metavar="N", help="Messages a second.  [no limit]")
_pin = click.option(
    "--pin/--no-pin",
    default=False,
    show_default=True,
    help="Run the writer on its own processor, clients and a niced dispatcher on the others.",
)


def _several(name: str, argument: str, choices: Sequence[str], text: str) -> Callable[[Any], Any]:
    return click.option(name, argument, multiple=True, type=click.Choice(choices), help=text)


_benchmark(
    "append",
    """Send frames, or single messages with --batch 1.

    Single sends are back to back with --in-flight 1, or at --rate 1000 one per ms.
    """,
    _common_options(0, 1000, "producers"),
    *(_rate, _pin),
    sends_frames=True,
)
_benchmark(
    "e2e",
    """Send while dispatch runs; then measure the latency to a waiting consumer.

    The lag of dispatch is measured too. The consumer gets one message per ms, or --rate.
    """,
    _common_options(0, 1000, "producers"),
    *(_rate, _pin),
    _option("--part", "both", "What to measure.", click.Choice(["both", "throughput", "latency"])),
    sends_frames=True,
)
_benchmark(
    "delay",
    """Send delayed messages, and measure how late they are stored and seen.

    --batch messages have the same delivery time.
    """,
    _common_options(0, 10, "producers"),
    _option("--rate", 10_000.0, "Messages due a second.", RateRange(1)),
    _option("--level", 0, "Delay level; 0: use --ahead.", click.IntRange(0, 18)),
    _option("--ahead", "3", "Time from the send to the delivery time, without --level.", SECONDS),
    sends_frames=True,
)
_benchmark(
    "dispatch",
    "Fill the log while the dispatcher is frozen, and measure how fast it catches up.",
    _common_options(2_000_000, 1000, "clients"),
    settings=_FROZEN_SETTINGS,
    own_group="freezes the dispatcher",
)
_benchmark(
    "pull",
    "Read loaded queues from start to end, as Arrow and as objects; --batch: messages per pull.",
    _common_options(2_000_000, 4096, "consumers"),
    _several("--as", "kinds", ["arrow", "objects"], "Only this form.  [both]"),
    click.option("--column", "columns", multiple=True, help="Arrow: only these columns.  [all]"),
    settings=_WARM,
)
_benchmark(
    "consume",
    """Consume loaded queues as a group: as objects, as Arrow, by tag and by SQL filter.

    The filters pass 1 message in 100.
    """,
    _common_options(500_000, 4096, "consumers"),
    _several(
        *("--as", "kinds", ["objects", "arrow", "tag", "sql", "none"]),
        "Only this case: all as objects or as Arrow, or filtered by tag or SQL.  [all four]",
    ),
    _option("--idle", 0, "Then measure this many idle consumers.", click.IntRange(0)),
    settings=_WARM,
)
_benchmark(
    "filter",
    """Search loaded queues for 1 message in 100, by tag and by properties.

    --batch: messages per pull.
    """,
    _common_options(2_000_000, 4096, "consumers"),
    _several("--by", "names", ["tag", "sql"], "Only this filter.  [both]"),
    settings=_WARM,
)
_benchmark(
    "query",
    """Time requests: by key, by id, one message by offset, offset by time.

    Requests are sent one at a time, each kind for --seconds.
    """,
    _common_options(1_000_000, 1000, "clients", "3"),
    settings=_WARM,
)
_benchmark(
    "retention",
    "Compare single sends for --seconds with single sends while retention deletes a filled log.",
    _common_options(0, 1, "producers"),
    _option("--fill", "4GiB", "Size of the log to fill and delete.", SIZE),
    settings=_RETENTION_SETTINGS,
    own_group="deletes all segments",
)


def _run(
    invocation: Invocation, name: str, given: dict[str, Any], own: dict[str, Any], own_settings: Sequence[str]
) -> None:
    """Run a benchmark: machine limits, group, clients, figures."""
    from mqproc.bench.cases import CASES
    from mqproc.bench.clients import Shape
    from mqproc.bench.limits import measure_limits
    from mqproc.bench.runs import Settings, bench_group

    out, given = invocation.out, given | {"rate": given.get("rate", 0.0)}
    shape = Shape(**{name: given[name] for name in Shape.__match_args__})
    client_cpus, pinned = _pin_processors(invocation) if given.get("pin") else (frozenset(), [])
    common = {name: given[name] for name in ("messages", "seconds", "warmup", "producers")}
    settings = Settings(shape, **common, out=out, client_cpus=client_cpus)
    options = [f"flush_disk_type={FLUSH[given['flush']]}", *pinned, *own_settings]
    queues_needed = shape.topics * shape.queues + 16
    if queues_needed > 65_536:
        options.append(f"max_queues={queues_needed}")
    store = invocation.store.absolute() if invocation.store else None
    with bench_group(store, [*options, *invocation.set_], invocation.config_file()) as group:
        limits = measure_limits(group.store.parent) if given["limits"] else {}
        found = CASES[name](group, settings, **own)
        if limits and (store_rate := found.get("store_bytes_per_second")):
            found["share_of_disk_rate"] = round(store_rate / limits["disk_bytes_per_s"], 3)
        document = {"parameters": given, **found, "machine": limits, "store": group.store}
    if out.is_json:
        out.document(document)
    else:
        print_result(out, found, limits)


def _check_frames(shared: dict[str, Any]) -> None:
    """Raise a usage error when --size and --batch exceed a frame, which clients would split."""
    from mqproc.client.connection import FRAME_BYTES_MAX

    if (frame_bytes := shared["size"] * shared["batch"]) > FRAME_BYTES_MAX:
        given = f"--size {shared['size']:,} and --batch {shared['batch']:,}"
        raise click.UsageError(f"{given} make frames of {frame_bytes:,} bytes; a client's limit is {FRAME_BYTES_MAX:,}")


def _pin_processors(invocation: Invocation) -> tuple[frozenset[int], list[str]]:
    """Processors for the clients, and options that pin the writer to another processor."""
    if invocation.store is not None:
        raise click.UsageError("--pin moves the writer to a processor: it needs its own group, without --store")
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise click.UsageError("--pin needs two processors; this process may use one")
    return frozenset(others), [f"writer_cpus={first}", f"dispatcher_nice={_PINNED_NICE}"]


def print_result(out: Output, found: dict[str, Any], limits: dict[str, Any]) -> None:
    """Print figures that summary lines do not show: CPU, memory, lag, and the machine's limits."""
    for name, value in found.items():
        if isinstance(value, dict):
            _print_figures(out, name, value)
        elif not isinstance(value, list):
            out.line(f"{name.replace('_', ' ')}: {value:,}")
    if refused := _disk_full_refusals(found):
        out.note(
            f"The disk was nearly full: {refused:,} frames were refused until there was room, and the figures include "
            "that wait. Free space, or have old segments deleted: --set disk_space_clean_forcibly_ratio=50"
        )
    if limits:
        out.line("this machine:")
        for name, value in limits.items():
            shown = f"{format_bytes(value)}/s" if name.endswith("bytes_per_s") else f"{value:.1f}"
            out.line(f"  {name.removesuffix('_bytes_per_s').replace('_', ' ')}: {shown}")


def _disk_full_refusals(found: dict[str, Any]) -> int:
    parts = [value for value in found.values() if isinstance(value, dict)]
    return sum(int(part.get("refusals", {}).get(DiskFullError.code, 0)) for part in parts)


# Prefixes of the figures in summary lines.
_SUMMARIZED = ("messages", "bytes", "requests", "seconds", "latency_us")


def _print_figures(out: Output, name: str, values: dict[str, Any], indent: str = "") -> None:
    left = {key: value for key, value in values.items() if not key.startswith(_SUMMARIZED)}
    if not left:
        return
    out.line(f"{indent}{name.replace('_', ' ')}:")
    for key, value in left.items():
        title = f"{indent}  {key.replace('_', ' ')}"
        if key in ("cpu_us_per_message", "cpu_percent"):
            shown = ", ".join(f"{role} {number:g}" for role, number in value.items() if number)
            out.line(f"{title}: {shown}")
        elif key == "pss_bytes":
            out.line(f"{title}: " + ", ".join(f"{role} {format_bytes(size)}" for role, size in value.items()))
        elif isinstance(value, dict):
            _print_figures(out, key, value, indent + "  ")
        else:
            out.line(f"{title}: {value:,}" if isinstance(value, (int, float)) else f"{title}: {value}")
