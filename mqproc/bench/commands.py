"""The commands of `mqproc bench` that measure a running group.

A command starts a group on a temporary store (or uses --store), runs clients in processes of their own, and prints a
line every five seconds, a summary like Kafka's, CPU and memory by role, and this machine's limits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mqproc.cli.options import SECONDS, SIZE, Command, CommandGroup, Invocation, RateRange, pass_invocation
from mqproc.cli.output import Output, format_bytes
from mqproc.errors import DiskFullError

if TYPE_CHECKING:
    from mqproc.bench.runs import BenchGroup, Settings

F = TypeVar("F", bound=Callable[..., Any])
FLUSH = {"async": "ASYNC_FLUSH", "sync": "SYNC_FLUSH"}
# Loaded messages stay in the page cache, as the first read would otherwise measure the disk.
_WARM = "page_cache_behind_bytes=0"
_PINNED_NICE = 5
_MESSAGES = {
    "producers": "End after this many measured ones; 0: after --seconds.",
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


def _shared(messages: int, batch: int, producers: str, seconds: str = "5") -> Callable[[F], F]:
    """Options that every benchmark has, with its own defaults."""
    positive = click.IntRange(1)
    names = tuple(dict.fromkeys((f"--{producers}", "--producers")))
    options = [
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
        _option("--warmup", "1.5", "Time before it that is left out.", SECONDS),
        _option("--in-flight", 4, "Unanswered requests; messages, when sent singly.", positive),
        click.option("--limits/--no-limits", default=True, show_default=True, help="Measure the machine's limits too."),
    ]

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_rate = click.option("--rate", type=RateRange(0), default=0.0, metavar="N", help="Messages a second.  [no limit]")
_pin = click.option(
    "--pin/--no-pin",
    default=False,
    show_default=True,
    help="Run the writer on its own processor, clients and a niced dispatcher on the others.",
)


@bench.command(cls=Command)
@_shared(0, 1000, "producers")
@_rate
@_pin
@pass_invocation
def append(invocation: Invocation, /, rate: float, **shared: Any) -> None:
    """Send frames, or single messages with --batch 1.

    Single sends are back to back with --in-flight 1, or at --rate 1000 one per ms.
    """
    from mqproc.bench.producing import append as measure

    _check_frames(shared)
    _run(invocation, shared, rate, measure)


@bench.command(cls=Command)
@_shared(0, 1000, "producers")
@_rate
@_pin
@click.option("--part", type=click.Choice(["both", "throughput", "latency"]), default="both", show_default=True,
              help="What to measure.")  # fmt: skip
@pass_invocation
def e2e(invocation: Invocation, /, rate: float, part: str, **shared: Any) -> None:
    """Send while dispatch runs; then measure the latency to a waiting consumer.

    The lag of dispatch is measured too. The consumer gets one message per ms, or --rate.
    """
    from mqproc.bench.producing import e2e as measure

    def both(bench: BenchGroup, settings: Settings) -> dict[str, Any]:
        return measure(bench, settings, throughput=part != "latency", latency=part != "throughput")

    if part != "latency":
        _check_frames(shared)
    _run(invocation, shared, rate, both)


@bench.command(cls=Command)
@_shared(0, 10, "producers")
@_option("--rate", 10_000.0, "Messages due a second.", RateRange(1))
@_option("--level", 0, "Delay level; 0: a delivery time by --ahead.", click.IntRange(0, 18))
@_option("--ahead", "3", "Time from send to due, without --level.", SECONDS)
@pass_invocation
def delay(invocation: Invocation, /, rate: float, level: int, ahead: float, **shared: Any) -> None:
    """Send delayed messages, and measure how late they are stored and seen.

    --batch is messages with the same time.
    """
    from mqproc.bench.producing import delay as measure

    _check_frames(shared)
    _run(invocation, shared, rate, lambda bench, settings: measure(bench, settings, level, ahead))


@bench.command(cls=Command)
@_shared(2_000_000, 1000, "clients")
@pass_invocation
def dispatch(invocation: Invocation, /, **shared: Any) -> None:
    """Fill the log while the dispatcher is frozen, and measure how fast it catches up."""
    from mqproc.bench.producing import dispatch as measure

    if invocation.store is not None:
        raise click.UsageError("bench dispatch freezes the dispatcher: it needs its own group, without --store")
    # A frozen role is silent, and must cause neither a restart nor back-pressure.
    own = ["heartbeat_timeout_ms=3600000", "busy_timeout_ms=3600000", f"max_dispatch_behind_bytes={1 << 50}"]
    _run(invocation, shared, 0.0, measure, own)


@bench.command(cls=Command)
@_shared(2_000_000, 4096, "consumers")
@click.option("--as", "kinds", multiple=True, type=click.Choice(["arrow", "objects"]), help="Only this form.  [both]")
@click.option("--column", "columns", multiple=True, help="Arrow: only these columns.  [all]")
@pass_invocation
def pull(invocation: Invocation, /, kinds: tuple[str, ...], columns: tuple[str, ...], **shared: Any) -> None:
    """Read loaded queues from start to end, as Arrow and as objects; --batch is messages a pull."""
    from mqproc.bench.reading import pull as measure

    chosen, selected = kinds or ("arrow", "objects"), list(columns) or None
    _run(invocation, shared, 0.0, lambda bench, settings: measure(bench, settings, chosen, selected), [_WARM])


@bench.command(cls=Command)
@_shared(500_000, 4096, "consumers")
@click.option("--as", "kinds", multiple=True, type=click.Choice(["objects", "arrow", "tag", "sql", "none"]),
              help="Only this: all as objects or as Arrow, or filtered by tag or SQL.  [all four]")  # fmt: skip
@_option("--idle", 0, "Then let this many consumers wait.", click.IntRange(0))
@pass_invocation
def consume(invocation: Invocation, /, kinds: tuple[str, ...], idle: int, **shared: Any) -> None:
    """Consume loaded queues as a group: as objects, as Arrow, by tag and by SQL filter.

    The filters pass 1 message in 100.
    """
    from mqproc.bench.reading import IDLE_SETTINGS, KINDS
    from mqproc.bench.reading import consume as measure

    chosen = tuple(kind for kind in kinds or KINDS if kind in KINDS)
    own = [_WARM, *(IDLE_SETTINGS if idle else ())]
    _run(invocation, shared, 0.0, lambda bench, settings: measure(bench, settings, chosen, idle), own)


@bench.command("filter", cls=Command)
@_shared(2_000_000, 4096, "consumers")
@click.option("--by", "names", multiple=True, type=click.Choice(["tag", "sql"]), help="Only this filter.  [both]")
@pass_invocation
def filter_(invocation: Invocation, /, names: tuple[str, ...], **shared: Any) -> None:
    """Search loaded queues for 1 message in 100, by tag and by properties.

    --batch is messages a pull.
    """
    from mqproc.bench.reading import filters

    _run(invocation, shared, 0.0, lambda bench, settings: filters(bench, settings, names or ("tag", "sql")), [_WARM])


@bench.command(cls=Command)
@_shared(1_000_000, 1000, "clients", "3")
@pass_invocation
def query(invocation: Invocation, /, **shared: Any) -> None:
    """Time requests: by key, by id, one message by offset, offset by time.

    Requests are sent one at a time, each kind for --seconds.
    """
    from mqproc.bench.reading import query as measure

    _run(invocation, shared, 0.0, measure, [_WARM])


@bench.command(cls=Command)
@_shared(0, 1, "producers")
@_option("--fill", "4GiB", "Bytes of log to be deleted.", SIZE)
@pass_invocation
def retention(invocation: Invocation, /, fill: int, **shared: Any) -> None:
    """Compare single sends for --seconds with single sends while retention deletes a filled log."""
    from mqproc.bench.producing import RETENTION_SETTINGS
    from mqproc.bench.producing import retention as measure

    if invocation.store is not None:
        raise click.UsageError("bench retention deletes all segments: it needs its own group, without --store")
    _run(invocation, shared, 0.0, lambda bench, settings: measure(bench, settings, fill), list(RETENTION_SETTINGS))


def _run(
    invocation: Invocation,
    shared: dict[str, Any],
    rate: float,
    measure: Callable[[BenchGroup, Settings], dict[str, Any]],
    own_settings: list[str] | None = None,
) -> None:
    """Run a benchmark: machine limits, group, clients, figures."""
    from mqproc.bench.clients import Shape
    from mqproc.bench.limits import measure_limits
    from mqproc.bench.runs import Settings

    out = invocation.out
    shape = Shape(
        **{name: shared[name] for name in ("size", "batch", "topics", "queues", "keys", "in_flight")}, rate=rate
    )
    client_cpus, pinned = _pinned(invocation) if shared.get("pin") else (frozenset(), [])
    common = {name: shared[name] for name in ("messages", "seconds", "warmup", "producers")}
    settings = Settings(shape, **common, out=out, client_cpus=client_cpus)
    queues_needed = shape.topics * shape.queues + 16
    options = [f"flush_disk_type={FLUSH[shared['flush']]}", *pinned, *(own_settings or [])]
    if queues_needed > 65_536:
        options.append(f"max_queues={queues_needed}")
    with _group(invocation, options) as group:
        limits = measure_limits(group.store.parent).to_json() if shared["limits"] else {}
        found = measure(group, settings)
        if limits and (store_rate := found.get("store_bytes_per_second")):
            found["share_of_disk_rate"] = round(store_rate / limits["disk_bytes_per_s"], 3)
        document = {"parameters": shared | {"rate": rate}, **found, "machine": limits, "store": group.store}
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


def _pinned(invocation: Invocation) -> tuple[frozenset[int], list[str]]:
    """The processors of clients, and options that give the writer another one."""
    if invocation.store is not None:
        raise click.UsageError("--pin moves the writer to a processor: it needs its own group, without --store")
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise click.UsageError("--pin needs two processors; this process may use one")
    return frozenset(others), [f"writer_cpus={first}", f"dispatcher_nice={_PINNED_NICE}"]


@contextmanager
def _group(invocation: Invocation, options: list[str]) -> Iterator[BenchGroup]:
    from mqproc.bench.runs import bench_group

    store = invocation.store.absolute() if invocation.store else None
    with bench_group(store, [*options, *invocation.set_], invocation.config_file(), invocation.out) as group:
        yield group


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
