"""`mqproc stat`, `errors` and `metrics`: control words, errors, and the list of metrics.

`stat` and `errors` only read files, so they also work for a stopped group, with its last values. `stat` must start
quickly, so the other commands import their modules on demand.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from mqproc.cli.options import SECONDS, TIME, Invocation, command
from mqproc.cli.output import Output, output_columns
from mqproc.errors import CorruptStoreError, NotRunningError
from mqproc.io.store_io import StoreIO
from mqproc.ipc import control_words
from mqproc.ipc.health import dispatch_behind_ms, not_offered
from mqproc.layout import control as layout
from mqproc.layout.error_log import OWNERS
from mqproc.paths import StorePaths
from mqproc.util.units import format_bytes, now_ms

if TYPE_CHECKING:
    from mqproc.ipc.error_log import SeenError

_WORD_COLUMNS = output_columns("name", "value:number", "unit", "owner", "help:text:meaning")
_WATCHED = output_columns("name", "value:number", "per_second:number:per s", "unit")
# In CSV each row has its time, since the blocks follow each other.
_RECORDED = [*output_columns("time_ms:time_ms:time"), *_WATCHED]
# Words that identify the file and its format; not shown.
_HIDDEN = frozenset({"magic", "version", "store_id"})
_STATE_WORDS = {
    "state": layout.STATE_NAMES,
    "supervised": layout.SUPERVISED_NAMES,
    "group_state": layout.GROUP_NAMES,
    "recovery_step": layout.STEP_NAMES,
    "retention_trigger": layout.DUE_NAMES,
    "retention_held_by": layout.HELD_NAMES,
}


@command()
@click.option("--prefix", default="", metavar="TEXT", help="Only names with this prefix: writer, disp, cq-flusher…")
@click.option("--changed", is_flag=True, help="Omit values of 0, with --watch too.")
@click.option("--watch", is_flag=True, help="Print repeatedly, with rates, until Ctrl-C or --timeout.")
@click.option("--interval", type=SECONDS, default="1", help="Interval of --watch.  [default: 1s]")
def stat(invocation: Invocation, prefix: str, changed: bool, watch: bool, interval: float) -> None:
    """Show every counter and state, also of a stopped group.

    Derived values come first: dispatch lag, unflushed bytes, whether the group is alive. The words of the control file
    follow. During recovery positions and counters are unknown and have no value.
    """
    out = invocation.out
    paths = invocation.existing_paths()
    if watch:
        _watch(paths, out, prefix, changed, max(interval, 0.05), invocation.deadline_s())
        return
    _print_words(out, read_all(paths), prefix, changed)


def read_all(paths: StorePaths) -> dict[str, Any]:
    """Derived values and all words, read at one time; unknown values are None."""
    words = control_words.read_words(paths)
    found: dict[str, Any] = {
        "alive": int(control_words.supervisor_alive(paths, words, time.monotonic_ns())),
        "dispatch_behind_bytes": control_words.dispatch_behind_bytes(words),
        "dispatch_behind_ms": dispatch_behind_ms(StoreIO(), paths, words),
        "flush_behind_bytes": control_words.flush_behind_bytes(words),
        "flushed": control_words.flushed(words),
        "read_only": int(control_words.refuses_messages(words)),
        **words,
    }
    if control_words.positions_known(words):
        return found
    return found | dict.fromkeys(_KNOWN_AFTER_RECOVERY)


_FIGURE_HELP = {
    "alive": ("", "1 while the supervisor's heartbeat is recent"),
    "dispatch_behind_bytes": ("bytes", "log that queues and index do not contain yet"),
    "dispatch_behind_ms": ("ms", "age of the oldest message that queues and index do not contain yet"),
    "flush_behind_bytes": ("bytes", "log that a power loss could lose"),
    "flushed": ("bytes", "end of the durable log"),
    "read_only": ("", "1 if no messages are accepted: a sync failed, or on_damage = read_only and there is damage"),
}


_OF_EVERY_ROLE = tuple(f".{name}" for name in layout.COMMON_NAMES)
# These are 0 until recovery has finished. Words of the monitor and about a role's process are valid earlier.
_KNOWN_AFTER_RECOVERY = (
    *(name for name in _FIGURE_HELP if name not in ("alive", "read_only")),
    *(
        name
        for name, word in layout.WORDS.items()
        if word.owner in layout.ROLES and word.owner != layout.MONITOR and not name.endswith(_OF_EVERY_ROLE)
    ),
)


def _word_rows(values: dict[str, Any], prefix: str, changed: bool) -> Iterator[dict[str, Any]]:
    for name, value in values.items():
        if not name.startswith(prefix) or (changed and not value) or name in _HIDDEN:
            continue
        word = layout.WORDS.get(name)
        unit, text = (word.unit, word.help) if word else _FIGURE_HELP[name]
        yield {"name": name, "value": value, "unit": unit, "owner": word.owner if word else "", "help": text}


def _for_table(row: dict[str, Any]) -> dict[str, Any]:
    """Format a row for the table: sizes with their unit, states with their name."""
    if row["unit"] == "bytes":
        sizes = {name: format_bytes(row[name]) for name in ("value", "per_second") if row.get(name) is not None}
        return row | sizes | {"unit": ""}
    return row | {"value": with_state_name(row["name"], row["value"])}


def with_state_name(name: str, value: int | None) -> int | str | None:
    """Format a state as `name (value)`; return other values unchanged."""
    if value is None:
        return None
    names = _STATE_WORDS.get(name.rpartition(".")[2])
    return f"{names[value]} ({value})" if names and 0 <= value < len(names) else value


def _print_words(out: Output, values: dict[str, Any], prefix: str, changed: bool) -> None:
    rows = list(_word_rows(values, prefix, changed))
    if out.shape == "json":
        out.document({"words": {row["name"]: row["value"] for row in rows}})
        return
    if out.shape == "table":
        rows = [_for_table(row) for row in rows]
    out.rows("words", _WORD_COLUMNS, rows)


def _watch(paths: StorePaths, out: Output, prefix: str, changed: bool, interval_s: float, ends_s: float) -> None:
    """Print changed words with rates, repeatedly; follows a new group.

    The last block is printed at `ends_s`, in monotonic seconds.
    """
    before: dict[str, Any] = {}
    before_s = 0.0
    if out.shape == "csv":
        out.rows("words", _RECORDED, ())
    while True:
        values, now_s = read_all(paths), time.monotonic()
        if before and before["epoch"] != values["epoch"]:
            before = {}
        _print_block(out, values, before, now_s - before_s, prefix, changed)
        before, before_s = values, now_s
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(interval_s, left_s))


def _print_block(
    out: Output, values: dict[str, Any], before: dict[str, Any], passed_s: float, prefix: str, changed: bool
) -> None:
    rows = [row for row in _word_rows(values, prefix, False) if _is_watched(row["name"], row["value"], before, changed)]
    for row in rows:
        name, value = row["name"], row["value"]
        known = value is not None and before.get(name) is not None
        row["per_second"] = round((value - before[name]) / passed_s) if known else None if value is None else 0
    if out.shape == "json":
        out.shape = "jsonl"
    if out.shape == "table" and out.is_terminal:
        sys.stdout.write("\x1b[2J\x1b[H")
    time_ms = now_ms()
    if out.is_json:
        out.document({"time_ms": time_ms, "words": {row["name"]: row["value"] for row in rows}})
    elif out.shape == "table":
        out.rows("words", _WATCHED, [_for_table(row) for row in rows])
        out.line("")
    else:
        out.further_rows("words", _RECORDED, [row | {"time_ms": time_ms} for row in rows])
    out.flush()


def _is_watched(name: str, value: int | None, before: dict[str, Any], changed: bool) -> bool:
    """Whether --watch prints a value: a derived value, or a word that has changed.

    In the first block words other than 0 count as changed. With `changed` derived values of 0 are omitted unless they
    have just become 0.
    """
    if name in _FIGURE_HELP:
        return not changed or bool(value) or (bool(before) and before[name] != value)
    if name.endswith("_ns"):
        return False
    return before[name] != value if before else bool(value)


# Errors


_ERROR_COLUMNS = output_columns(
    "owner:text:role, count:count:times, first_ms:time_ms:first, last_ms:time_ms:last, text:text:what"
)


@command()
@click.option("--role", type=click.Choice(OWNERS), help="Only errors of this process.")
@click.option("--since", type=TIME, metavar="TIME", help="Only errors after this time: a time, or an age (15m, 2h).")
@click.option("--follow", is_flag=True, help="Print new errors as they occur, until Ctrl-C or --timeout.")
@click.option("--interval", type=SECONDS, default="500ms", help="Interval of --follow.  [default: 500ms]")
def errors(invocation: Invocation, role: str | None, since: int | None, follow: bool, interval: float) -> None:
    """Show warnings and errors, each distinct one once.

    Covers every process of the group. The list is kept in the store across restarts, so it also shows the reason of the
    last exit. Errors that differ only in numbers and ids are the same. The newest is last.
    """
    paths, out = invocation.existing_paths(), invocation.out
    if follow and out.shape == "json":
        out.shape = "jsonl"
    found = _selected_errors(paths, role, since)
    if found or out.shape != "table":
        out.rows("errors", _ERROR_COLUMNS, map(dataclasses.asdict, found))
    else:
        out.note("no errors")
    if follow:
        out.flush()
        _follow_errors(paths, out, role, found, max(interval, 0.05), invocation.deadline_s())


def _selected_errors(paths: StorePaths, role: str | None, since_ms: int | None) -> list[SeenError]:
    """The selected errors, oldest first."""
    from mqproc.ipc.error_log import seen_errors

    found = [
        error
        for error in seen_errors(StoreIO(), paths)
        if (role is None or error.owner == role) and (since_ms is None or error.last_ms >= since_ms)
    ]
    return found[::-1]


def _counts_of(found: Iterable[SeenError]) -> dict[tuple[str, str], int]:
    return {(error.owner, error.text): error.count for error in found}


def _follow_errors(
    paths: StorePaths, out: Output, role: str | None, found: Iterable[SeenError], pause_s: float, ends_s: float
) -> None:
    """Print new occurrences of errors with their number, until `ends_s`, in monotonic seconds."""
    seen = _counts_of(found)
    while (left_s := ends_s - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        found = _selected_errors(paths, role, None)
        for error in found:
            more = error.count - seen.get((error.owner, error.text), 0)
            # The count starts again at 1 if the entry was reused for another error.
            more = error.count if more < 0 else more
            if more:
                _print_error(out, error, more)
        seen = _counts_of(found)
        out.flush()


def _print_error(out: Output, error: SeenError, more: int) -> None:
    row: dict[str, Any] = {**dataclasses.asdict(error), "new": more}
    if out.shape != "table":
        out.further_rows("errors", _ERROR_COLUMNS, [row])
        return
    moment = time.strftime("%H:%M:%S", time.localtime(error.last_ms / 1000))
    out.line(f"{moment}  {error.owner}  {f'{more:,} times  ' if more > 1 else ''}{error.text}")


# Metrics


PORT_MAX: Final = 65_535
_METRIC_COLUMNS = output_columns("name", "kind:text:type", "unit", "labels", "help:text:meaning")


@command()
@click.option("--check", is_flag=True, help="Compare with a scrape of the running group; exit code 1 if they differ.")
def metrics(invocation: Invocation, check: bool) -> int:
    """List the metrics of /metrics."""
    from mqproc.metrics.catalogue import METRICS

    if check:
        return _check_metrics(invocation)
    rows = ({column.name: getattr(metric, column.name) for column in _METRIC_COLUMNS} for metric in METRICS)
    invocation.out.rows("metrics", _METRIC_COLUMNS, rows)
    return 0


def _check_metrics(invocation: Invocation) -> int:
    import urllib.error
    import urllib.request

    from mqproc.cli.admin.supervisor_client import SOCKET_WAIT_MAX_S
    from mqproc.ipc.control import Control
    from mqproc.metrics.catalogue import METRICS, family_names

    io, paths = StoreIO(), invocation.existing_paths()
    control = Control.open(io, paths)
    port = control.load(layout.MONITOR_PORT)
    alive = control_words.supervisor_alive(paths, control.snapshot(), time.monotonic_ns())
    control.close()
    options = invocation.store_options(io, paths)
    if alive and not port:
        raise NotRunningError(not_offered(options))
    if not 0 <= port <= PORT_MAX:
        raise CorruptStoreError(f"{paths.control}: monitor_port = {port:,} is not a port from 1 to {PORT_MAX:,}")
    address = f"http://{_connect_host(options.metrics_host)}:{port}/metrics"
    try:
        # Ignore proxy settings: a proxy would resolve localhost to its own machine.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(address, timeout=min(invocation.timeout, SOCKET_WAIT_MAX_S)) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError) as error:
        raise NotRunningError(f"{address}: {error}") from None
    found = family_names(text)
    expected = {metric.name for metric in METRICS}
    missing, unknown = sorted(expected - found), sorted(found - expected)
    out = invocation.out
    if out.is_json:
        out.document({"address": address, "missing": missing, "unknown": unknown})
    else:
        for text, names in (("missing", missing), ("not in the catalogue", unknown)):
            for name in names:
                out.line(f"{name}: {text}")
        out.line(f"{len(found & expected)} of {len(expected)} metrics of the catalogue at {address}")
    return 1 if missing or unknown else 0


def _connect_host(host: str) -> str:
    """The host in the URL of a monitor that listens on `host`; localhost for all addresses."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
