"""`mqproc bench spark`: read a store through Spark, alternating with the bare kernels.

    round 1 2 3 …   kernel · all columns · by the source · not decoded · counts · filter · JSON lines · 1 % · nothing
                                                                                                 best of each
Rates are messages of the store per second; a ratio compares a query with the kernels. All columns are read by
`messages(…)`, like the other queries, and by `format("mqproc")`, which makes Spark convert each row twice. "Not
decoded" is one decoded batch of each task, sent repeatedly: the cost of Spark alone, which bounds any source in Python.
JSON lines are a part of the messages; their queries are compared by rate. The fixed cost is that of a query without
messages.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import tempfile
import timeit
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import psutil

from mqproc.bench.clients import Shape
from mqproc.bench.stores import filled_store
from mqproc.cli.options import SIZE, Command, Invocation, pass_invocation
from mqproc.cli.output import Output
from mqproc.cli.spark.session import session
from mqproc.store.read.reader import StoreReader
from mqproc.util.units import format_bytes

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

PROCESSES: Final = 2
_LOG_BYTES_MAX: Final = 4 << 30
_JSON_SHARE: Final = 8
"""One message of this many becomes a JSON line."""
# Lower bounds of ratios; the upper bound of `range_share`.
GOALS: Final = {
    "all_columns": 0.35,
    "all_columns_by_source": 0.35,
    "counts": 0.8,
    "filter": 1.5,
    "times_json": 10.0,
    "range_share": 0.05,
}
# Queries that are compared with the kernels.
_OF_KERNELS: Final = ("all_columns", "all_columns_by_source", "counts", "filter")
# Queries of JSON lines, and the equivalent queries of the store.
_OF_JSON: Final = {
    "json": "all_columns",
    "json_inferred": "all_columns",
    "json_counts": "counts",
    "json_filter": "filter",
}
_ANSWER_S: Final = 600.0
_NAMES: Final = {
    "kernel": f"kernels, {PROCESSES} processes, all columns",
    "all_columns": "Spark, all columns, messages(…)",
    "all_columns_by_source": 'Spark, all columns, format("mqproc")',
    "not_decoded": "Spark, all columns, one batch repeated",
    "counts": "Spark, groupBy(topic, window).count()",
    "filter": "Spark, one queue of a topic",
    "json": "Spark, JSON lines, a part",
    "json_inferred": "Spark, JSON lines without a schema",
    "json_counts": "Spark, JSON lines, counts",
    "json_filter": "Spark, JSON lines, one queue",
    "range": "Spark, 1 % of the time",
    "nothing": "Spark, a time without messages",
}


@click.command(cls=Command)
@click.option("--log-size", "--size-bytes", "log_size", type=SIZE, help="Log of the temporary store.  [what fits]")
@click.option("--size", type=SIZE, default="1KiB", show_default=True, help="Bytes of a body.")
@click.option("--topics", type=click.IntRange(1), default=4, show_default=True, help="Topics, in turns.")
@click.option("--queues", type=click.IntRange(1), default=8, show_default=True, help="Queues of a topic.")
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Rounds, of which the best counts."
)
@click.option("--conf", multiple=True, metavar="NAME=VALUE", help="A setting of Spark's; may be repeated.")
@pass_invocation
def spark(
    invocation: Invocation,
    /,
    log_size: int | None,
    size: int,
    topics: int,
    queues: int,
    rounds: int,
    conf: tuple[str, ...],
) -> None:
    """Read a store through Spark, beside the kernels alone in two processes.

    A group fills a temporary store and stops, or --store names one, which is only read.
    """
    out = invocation.out
    shape = Shape(size, 1000, topics, queues, 1, 4)
    with filled_store(invocation, shape, log_size or _fitting()) as store:
        settings = ["spark.driver.memory=2g", "spark.sql.shuffle.partitions=2", *conf]
        with session(f"local[{PROCESSES}]", settings) as found:
            figures = measure(found, store, rounds)
    if out.is_json:
        out.document(figures)
    else:
        _print(out, figures)


def _fitting() -> int:
    """Size of a log that fits memory, and the disk together with its JSON lines."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    return int(min(_LOG_BYTES_MAX, psutil.virtual_memory().available // 4, free // 3))


def measure(spark: SparkSession, store: Path, rounds: int) -> dict[str, Any]:
    """Seconds of each case in its best round, and ratios."""
    targets = _QueryTargets(store)
    with tempfile.TemporaryDirectory(prefix="mqproc-bench-json-") as folder, _kernels(store) as kernels:
        lines = _write_json(spark, targets, Path(folder) / "lines")
        cases = {"kernel": kernels, **_queries(spark, targets, Path(folder) / "lines")}
        seconds: dict[str, float] = {}
        # The first round is a warm-up: compiling, loading, page faults.
        for number in range(rounds + 1):
            for name, run in cases.items():
                took_s = timeit.timeit(run, number=1)
                if number:
                    seconds[name] = min(seconds.get(name, took_s), took_s)
    return _figures(targets, lines, seconds)


class _QueryTargets:
    """A store, and the queue and times that queries select."""

    def __init__(self, store: Path) -> None:
        self.store = store
        with StoreReader(store) as reader:
            queues = [queue for queue in reader.queues() if queue.max_offset > queue.min_offset]
            self.messages = sum(queue.max_offset - queue.min_offset for queue in queues)
            self.bytes = reader.visible.end - reader.visible.begin
            queue = max(queues, key=lambda each: each.max_offset - each.min_offset)
            self.topic, self.queue_id = queue.topic, queue.queue_id
            count = queue.max_offset - queue.min_offset
            half, after = (queue.min_offset + count * percent // 100 for percent in (50, 51))
            self.begin_ms = reader.store_time_ms(queue.topic, queue.queue_id, half)
            self.end_ms = max(self.begin_ms + 1, reader.store_time_ms(queue.topic, queue.queue_id, after))
            self.after_ms = reader.store_time_ms(queue.topic, queue.queue_id, queue.max_offset - 1) + 3_600_000


# The kernels


@contextlib.contextmanager
def _kernels(store: Path) -> Iterator[Callable[[], None]]:
    """A function that makes two processes decode all columns, each of half of the log."""
    halves = [(str(store), number) for number in range(PROCESSES)]
    with contextlib.ExitStack() as stack:
        # A pool each: one pool could give both halves to one process.
        pools = [stack.enter_context(multiprocessing.get_context("spawn").Pool(1)) for _ in halves]

        def run() -> None:
            for result in [pool.apply_async(_decode, half) for pool, half in zip(pools, halves, strict=True)]:
                result.get(_ANSWER_S)

        yield run


def _decode(store: str, number: int) -> None:
    from mqproc.spark.batches import read_partition
    from mqproc.spark.options import column_types, read_options
    from mqproc.spark.planning import plan

    options = read_options({"path": store, "verifyCrc": "false", "minPartitions": str(PROCESSES)})
    names = list(column_types("mqproc"))
    for partition in plan(options)[number::PROCESSES]:
        for _batch in read_partition(options, names, partition):
            pass


# The queries


def _queries(spark: SparkSession, targets: _QueryTargets, lines: Path) -> dict[str, Callable[[], None]]:
    from pyspark.sql import functions as F

    from mqproc.spark import messages
    from mqproc.spark.options import schema_ddl

    def read(**selection: Any) -> DataFrame:
        return messages(spark, targets.store, **selection)

    def json_lines(schema: str = schema_ddl("mqproc")) -> DataFrame:
        return spark.read.schema(schema).json(str(lines))

    def counted(found: DataFrame) -> DataFrame:
        return found.groupBy("topic", F.window("store_timestamp", "1 second")).count()

    repeated = _repeat_batches(spark, targets)
    one_queue = (F.col("topic") == targets.topic) & (F.col("queue_id") == targets.queue_id)
    # One clock filled the store within seconds, so clockStepMs is 0.
    frames: dict[str, Callable[[], DataFrame]] = {
        "all_columns": read,
        "all_columns_by_source": lambda: spark.read.format("mqproc").load(str(targets.store)),
        "not_decoded": lambda: repeated,
        "counts": lambda: counted(read(columns=["topic", "store_timestamp"])),
        "filter": lambda: read(topic=targets.topic, queue_id=targets.queue_id),
        "json": json_lines,
        "json_inferred": lambda: spark.read.json(str(lines)),
        "json_counts": lambda: counted(json_lines("topic string, store_timestamp timestamp")),
        "json_filter": lambda: json_lines().where(one_queue),
        "range": lambda: read(begin=targets.begin_ms, end=targets.end_ms, clockStepMs=0),
        "nothing": lambda: read(begin=targets.after_ms, end=targets.after_ms + 1, clockStepMs=0),
    }

    def run(name: str) -> None:
        if name.endswith("counts"):
            frames[name]().collect()
        else:
            frames[name]().write.format("noop").mode("overwrite").save()

    return {name: partial(run, name) for name in frames}


def _write_json(spark: SparkSession, targets: _QueryTargets, to: Path) -> int:
    """Write all columns of a part of the messages as JSON lines; returns their number."""
    from mqproc.spark import messages

    some = messages(spark, targets.store).where(f"queue_offset % {_JSON_SHARE} = 0")
    some.write.json(str(to))
    return spark.read.text(str(to)).count()


def _repeat_batches(spark: SparkSession, targets: _QueryTargets) -> DataFrame:
    """As many rows as messages: the first batch of each task, sent repeatedly."""
    from mqproc.spark.batch_read import plan_messages

    found = plan_messages(spark, targets.store)
    batches_of, of_task = found.read, targets.messages // found.frame.count()

    def read(partitions: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for partition in partitions:
            for batch in islice(batches_of(iter([partition])), 1):
                for sent in range(0, of_task, batch.num_rows):
                    yield batch.slice(0, of_task - sent)

    return replace(found, read=read).rows()


# Figures


def _figures(targets: _QueryTargets, lines: int, seconds: dict[str, float]) -> dict[str, Any]:
    ratios = {name: seconds["kernel"] / seconds[name] for name in _OF_KERNELS}
    for name, ours in _OF_JSON.items():
        ratios[f"times_{name}"] = (targets.messages / seconds[ours]) / (lines / seconds[name])
    ratios["not_decoded"] = seconds["kernel"] / seconds["not_decoded"]
    ratios["not_decoded_times_json"] = ratios["times_json"] * seconds["all_columns"] / seconds["not_decoded"]
    ratios["range_share"] = max(0.0, seconds["range"] - seconds["nothing"]) / seconds["all_columns"]
    return {
        "store": str(targets.store),
        "messages": targets.messages,
        "bytes": targets.bytes,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
        "goals": GOALS,
        "json_messages": lines,
    }


def _print(out: Output, figures: dict[str, Any]) -> None:
    out.line(f"{figures['messages']:,} messages, {format_bytes(figures['bytes'])} of log")
    for name, seconds in figures["seconds"].items():
        count = figures["json_messages"] if name.startswith("json") else figures["messages"]
        rate = f"{count / seconds:,.0f} messages/s" if name not in ("range", "nothing") else ""
        out.line(f"{_NAMES[name]:<40} {seconds:7.3f} s  {rate}")
    shown = figures["ratios"]
    for name in _OF_KERNELS:
        out.line(f"{_NAMES[name]}: {shown[name]:.2f} of the kernels' rate (goal {GOALS[name]:g})")
    for name in _OF_JSON:
        out.line(f"{shown[f'times_{name}']:.1f} times the rate of: {_NAMES[name]} (goal {GOALS['times_json']:g})")
    most = f"{shown['not_decoded']:.2f} of the kernels' rate, {shown['not_decoded_times_json']:.1f} times JSON lines"
    out.line(f"{_NAMES['not_decoded']}: {most}: the upper bound for a read of all columns")
    out.line(f"1 % of the time: {shown['range_share']:.1%} of a full read beyond the fixed cost (goal 5 %)")
