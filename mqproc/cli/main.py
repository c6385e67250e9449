"""The `mqproc` command: its groups, what errors look like, and what exit codes mean.

An error is one line on stderr: what, where, what to do. `--verbose` shows the traceback too.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mqproc.cli.commands import Group
from mqproc.cli.ending import end_in_order
from mqproc.cli.invocation import Invocation, process_began_s
from mqproc.cli.output import STDERR, STDOUT, harmless, heard_or_not, let_go
from mqproc.errors import MqprocError, StoreAccessError
from mqproc.lost_pages import name_lost_pages
from mqproc.version import installed_version

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

EXIT_CODES = {
    0: "done",
    1: "failed, or a check found something",
    2: "usage",
    3: "could not start, or the store is none or out of reach",
    4: "timeout, or the answer was lost: it may have been done",
    5: "not found: store, file, topic, message, group",
    6: "store damaged",
    7: "store locked by another process",
    8: "configuration wrong",
    9: "group not running",
    130: "interrupted",
    143: "told to end by SIGTERM",
}
NOT_FOUND = 5
INTERRUPTED = 130
_OUTPUT = "standard output"

_LAZY = {
    "up": ("mqproc.cli.group:up", "Start the group on a store and stay in the foreground."),
    "down": ("mqproc.cli.group:down", "Stop the group in order."),
    "restart": ("mqproc.cli.group:restart", "Restart one role."),
    "run": ("mqproc.cli.group:run", "Run one role at this terminal, for a debugger."),
    "status": ("mqproc.cli.group:status", "Show the roles, their memory, and how far they are."),
    "demo": ("mqproc.cli.demo:demo", "Show everything on 336,776 real flights."),
    "examples": ("mqproc.cli.examples:examples", "Show examples: commands and Python that run as they stand."),
    "topic": ("mqproc.cli.topic:topic", "Create, list, inspect and delete topics."),
    "send": ("mqproc.cli.send:send", "Send messages: one, from stdin, or a file's lines."),
    "import": ("mqproc.cli.importing:import_", "Import CSV, JSON lines, Parquet or plain lines."),
    "replay": ("mqproc.cli.replay:replay", "Send stored messages once more, to another topic."),
    "group": ("mqproc.cli.consumer_group:group", "Consumer groups: members, lag, progress, dead letters."),
    "transaction": ("mqproc.cli.transaction:transaction", "Open transactions: list, commit, roll back, check."),
    "tail": ("mqproc.cli.tail:tail", "Print messages of a topic, and follow it."),
    "message": ("mqproc.cli.message:message", "Find messages by id, key, offset, time or content."),
    "top": ("mqproc.cli.top.command:top", "Watch a group live on the whole screen."),
    "errors": ("mqproc.cli.errors:errors", "Show what has gone wrong: each distinct error once."),
    "doctor": (
        "mqproc.cli.doctor.command:doctor",
        "Find what is wrong with this machine, the options and a store, and say what mends it.",
    ),
    "warm": ("mqproc.cli.warm:warm", "Compile what this version needs, so that no start waits for it."),
    "stat": ("mqproc.cli.stat:stat", "Show every shared word, also of a dead group."),
    "store": ("mqproc.cli.store:store", "Look into a store's files; nothing need run."),
    "spark": ("mqproc.cli.spark:spark", "Run jobs over stores on Spark."),
    "bench": ("mqproc.bench:bench", "Measure this store against this machine's limits."),
    "config": ("mqproc.cli.config:config", "Show, check and explain options."),
    "metrics": ("mqproc.cli.metrics:metrics", "List the metrics that /metrics offers."),
    "completion": ("mqproc.cli.completion:completion", "Print the shell completion script."),
}


def _print_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        click.echo(f"mqproc {installed_version()}")
        context.exit()


class MainGroup(Group):
    """The outermost group: a closed pipe ends it quietly, and its help tells the exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        result = 0
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader has seen enough.
            let_go(STDOUT)
        return result

    def make_context(self, *arguments: Any, **settings: Any) -> click.Context:
        """As above for the group's own --help and --version, which are printed here."""
        try:
            return super().make_context(*arguments, **settings)
        except BrokenPipeError:
            let_go(STDOUT)
            raise click.exceptions.Exit(0) from None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])
        with formatter.section("First steps"):
            formatter.write_dl(
                [
                    ("mqproc demo", "see it work"),
                    ("mqproc up --store DIR", "start a group; Ctrl-C stops it"),
                    ("mqproc send TOPIC TEXT", "send a message"),
                    ("mqproc tail TOPIC", "read it back"),
                    ("mqproc examples", "more, in Python too"),
                ]
            )


@click.group(
    cls=MainGroup,
    lazy=_LAZY,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """RocketMQ's storage engine as a group of Python processes on one machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, this program's own unless arguments are given, and return the exit code."""
    if arguments is None:
        end_in_order()
        name_lost_pages(_end_with)
        _open_what_is_closed()
        _name_output()
        _print_anything()
    invocation = Invocation(began_s=process_began_s() if arguments is None else time.monotonic())
    try:
        result = cli.main(arguments, "mqproc", standalone_mode=False, obj=invocation)
    except click.exceptions.Abort:
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        with heard_or_not():
            click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.UsageError as error:
        help_command = f"; {error.ctx.command_path} --help tells more" if error.ctx else ""
        # What may be chosen where something is missing is told in lines of their own.
        message = error.format_message().replace("\n\t", " ")
        return _failed(f"{message.removesuffix('.')}{help_command}", error.exit_code, invocation)
    except click.ClickException as error:
        return _failed(error.format_message(), error.exit_code, invocation)
    except MqprocError as error:
        return _failed(str(error), error.exit_code, invocation)
    except OSError as error:
        if error.filename == _OUTPUT:
            let_go(STDOUT)
        where = f"{error.filename}: " if error.filename else ""
        return _failed(f"{where}{error.strerror or error}", _exit_code_of(error, invocation), invocation)
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _end_with(text: str, code: int) -> NoReturn:
    """At once: what was going on can neither go on nor be unwound."""
    with contextlib.suppress(OSError):
        os.write(STDERR, f"mqproc: {text}\n".encode())
    os._exit(code)


def _exit_code_of(error: OSError, invocation: Invocation) -> int:
    if isinstance(error, FileNotFoundError):
        return NOT_FOUND
    if isinstance(error, PermissionError) and isinstance(error.filename, str):
        with contextlib.suppress(MqprocError, click.ClickException, OSError):
            store, _ = invocation.find_store()
            if store is not None and Path(error.filename).absolute().is_relative_to(store):
                return StoreAccessError.exit_code
    return 1


def _open_what_is_closed() -> None:
    """Have output go nowhere that the caller closed, as by `>&-`; Python has no stream there, and the next file that
    is opened, one of the store's, would get its number.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = open(STDOUT, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(STDERR, "w", closefd=False)  # noqa: SIM115


class _StandardOutput(io.FileIO):
    """Standard output whose errors name it: a disk that is full would be taken for the store's."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = _OUTPUT
            raise


def _name_output() -> None:
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):
        return
    raw = _StandardOutput(out.fileno(), "w", closefd=False)
    # With python -u nothing is buffered.
    buffer = raw if isinstance(out.buffer, io.RawIOBase) else io.BufferedWriter(raw)
    sys.stdout = io.TextIOWrapper(
        buffer, out.encoding, out.errors, line_buffering=out.line_buffering, write_through=out.write_through
    )


def _print_anything() -> None:
    """Have a character that stdout's encoding lacks printed as JSON escapes it, instead of failing."""
    codecs.register_error("json", _escaped)
    out = sys.stdout
    # The C locale's "surrogateescape" fails as "strict" does, where Python was told to leave ASCII alone.
    if isinstance(out, io.TextIOWrapper) and (out.errors == "strict" or codecs.lookup(out.encoding).name == "ascii"):
        out.reconfigure(errors="json")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _failed(text: str, exit_code: int, invocation: Invocation) -> int:
    with heard_or_not():
        if invocation.verbose:
            traceback.print_exc()
        click.secho("mqproc: ", fg="red", nl=False, err=True, color=_stderr_color(invocation))
        click.echo(harmless(text) if sys.stderr.isatty() else text, err=True)
    return exit_code


def _stderr_color(invocation: Invocation) -> bool | None:
    if invocation.color != "auto":
        return invocation.color == "always"
    return False if os.environ.get("NO_COLOR") else None
