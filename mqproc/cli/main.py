"""The `mqproc` command: its commands, exit codes, error output, and exit on signals.

An error is one line on stderr that names the problem, the place and the remedy. `--verbose` adds the traceback.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from mqproc.cli.options import Command, CommandGroup, Invocation, process_start_s
from mqproc.cli.output import (
    STDERR,
    STDOUT,
    discard_output,
    escape_controls,
    ignore_write_errors,
    is_colored,
    with_program,
)
from mqproc.errors import MqprocError, StoreAccessError
from mqproc.io.sigbus import install_sigbus_handler
from mqproc.util.version import installed_version

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

EXIT_CODES: Final = {
    0: "done",
    1: "failed, or a check found a problem",
    2: "wrong usage",
    3: "could not start, or no usable store at this path",
    4: "timeout or lost answer: the request may have been carried out",
    5: "not found: store, file, topic, message, group",
    6: "store damaged",
    7: "store locked by another process",
    8: "wrong configuration",
    9: "group not running",
    130: "interrupted",
    143: "terminated by SIGTERM",
}
NOT_FOUND: Final = 5
INTERRUPTED: Final = 130
COMPLETION_VARIABLE: Final = "_MQPROC_COMPLETE"
_OUTPUT: Final = "standard output"

_LAZY: Final = {
    "up": ("mqproc.cli.admin.lifecycle:up", "Start a group on a store and stay in the foreground."),
    "down": ("mqproc.cli.admin.lifecycle:down", "Stop the group in order."),
    "restart": ("mqproc.cli.admin.lifecycle:restart", "Restart one role."),
    "run": ("mqproc.cli.admin.lifecycle:run", "Run one role at this terminal, for debugging."),
    "status": (
        "mqproc.cli.admin.lifecycle:status",
        "Show the group's state, the roles, their memory and the log positions.",
    ),
    "demo": ("mqproc.cli.admin.demo:demo", "Import and query 336,776 real flights."),
    "examples": ("mqproc.cli.admin.guides:examples", "Show examples: commands and Python code that run as shown."),
    "guide": ("mqproc.cli.admin.guides:guide", "Show a guide, or list the guides."),
    "topic": ("mqproc.cli.topic:topic", "Create, list, inspect and delete topics."),
    "send": ("mqproc.cli.message.send:send", "Send messages: one, from stdin, or the lines of a file."),
    "import": ("mqproc.cli.message.import_files:import_", "Import CSV, JSON lines, Parquet or plain lines."),
    "replay": ("mqproc.cli.message.replay:replay", "Send stored messages again, to another topic."),
    "worker": ("mqproc.cli.worker:worker", "Handle messages with a function of yours."),
    "group": ("mqproc.cli.group:group", "Consumer groups: members, lag, offsets, dead letters."),
    "transaction": ("mqproc.cli.transaction:transaction", "Open transactions: list, commit, roll back, check."),
    "tail": ("mqproc.cli.message.tail:tail", "Print messages of a topic, and follow it."),
    "message": ("mqproc.cli.message:message", "Find messages by id, key, offset, time or content; cancel timed ones."),
    "top": ("mqproc.cli.admin.top:top", "Watch a group live, full screen."),
    "errors": ("mqproc.cli.admin.monitoring:errors", "Show warnings and errors, each distinct one once."),
    "doctor": (
        "mqproc.cli.admin.doctor:doctor",
        "Check this machine, the options and a store, and say how to fix each problem.",
    ),
    "warm": ("mqproc.cli.admin.warm:warm", "Compile all kernels in advance, so that no start has to."),
    "stat": ("mqproc.cli.admin.monitoring:stat", "Show every counter and state, also of a stopped group."),
    "store": ("mqproc.cli.store:store", "Inspect, verify, repair and export a store's files."),
    "spark": ("mqproc.cli.spark:spark", "Run jobs over stores on Spark."),
    "bench": ("mqproc.bench:bench", "Measure this store against this machine's limits."),
    "config": ("mqproc.cli.admin.config:config", "Show, check and explain options."),
    "metrics": ("mqproc.cli.admin.monitoring:metrics", "List the metrics of /metrics."),
}
_FIRST_STEPS: Final = (
    ("mqproc demo", "see it work"),
    ("mqproc up", "start a group on ./mqproc-store; Ctrl-C stops it"),
    ("mqproc send TOPIC TEXT", "send a message"),
    ("mqproc tail TOPIC", "read it back"),
    ("mqproc examples", "more commands, and Python code"),
    ("mqproc guide", "how to do common tasks"),
)


# The command tree


def _print_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        click.echo(f"mqproc {installed_version()}")
        context.exit()


class MainGroup(CommandGroup):
    """The top-level group: ends without an error if the output pipe is closed."""

    def invoke(self, ctx: click.Context) -> Any:
        result = 0
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            discard_output(STDOUT)
        return result

    def make_context(self, *arguments: Any, **settings: Any) -> click.Context:
        """Handle a closed pipe for the group's own --help and --version, which print here."""
        try:
            return super().make_context(*arguments, **settings)
        except BrokenPipeError:
            discard_output(STDOUT)
            raise click.exceptions.Exit(0) from None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])
        with formatter.section("First steps"):
            formatter.write_dl(_FIRST_STEPS)


@click.group(
    cls=MainGroup, lazy=_LAZY, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """RocketMQ's storage engine as a group of Python processes on one machine."""


@cli.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
def completion(shell: str) -> None:
    """Print the shell completion script.

    SHELL is bash, zsh or fish. The script completes commands, options and their values, and the names of topics and
    groups of the store that the command line or MQPROC_STORE names.

    \b
    bash:  eval "$(mqproc completion bash)"                    in ~/.bashrc
    zsh:   eval "$(mqproc completion zsh)"                     in ~/.zshrc, after compinit
    fish:  mqproc completion fish > ~/.config/fish/completions/mqproc.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "mqproc", COMPLETION_VARIABLE).source())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (sys.argv unless arguments are given) and return the exit code."""
    if arguments is None:
        _start_without_oo()
        exit_on_signals()
        install_sigbus_handler(_exit_now)
        _open_closed_streams()
        _name_stdout_in_errors()
        _escape_unencodable()
    invocation = Invocation(start_s=process_start_s() if arguments is None else time.monotonic())
    try:
        result = cli.main(arguments, "mqproc", standalone_mode=False, obj=invocation)
    except click.exceptions.Abort:
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        with ignore_write_errors():
            click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.UsageError as error:
        help_command = f"; see {error.ctx.command_path} --help" if error.ctx else ""
        # click lists the choices of a missing argument on lines of their own.
        message = error.format_message().replace("\n\t", " ")
        return _report_error(f"{message.removesuffix('.')}{help_command}", error.exit_code, invocation)
    except click.ClickException as error:
        return _report_error(error.format_message(), error.exit_code, invocation)
    except MqprocError as error:
        return _report_error(str(error), error.exit_code, invocation)
    except OSError as error:
        if error.filename == _OUTPUT:
            discard_output(STDOUT)
        where = f"{error.filename}: " if error.filename else _deleted_folder()
        return _report_error(f"{where}{error.strerror or error}", _exit_code_of(error, invocation), invocation)
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _deleted_folder() -> str:
    """Names the deleted current folder in the error for a relative path."""
    try:
        os.getcwd()
    except OSError:
        return "the current folder was deleted; give absolute paths, or change to another: "
    return ""


def _start_without_oo() -> None:
    """Start again without -OO: help texts and the kernel cache need docstrings."""
    if sys.flags.optimize < 2:
        return
    os.environ.pop("PYTHONOPTIMIZE", None)
    own, *rest = sys.orig_argv
    count = next((n for n, part in enumerate(rest) if not part.startswith("-") or part in ("-m", "-c")), len(rest))
    flags = [part for part in (_O.sub("", flag) for flag in rest[:count]) if part != "-"]
    os.execv(sys.executable or own, [own, *flags, *rest[count:]])


_O: Final = re.compile(r"(?<=^-)O+$")


def _report_error(text: str, exit_code: int, invocation: Invocation) -> int:
    text = with_program(text, _LAZY)
    with ignore_write_errors():
        if invocation.verbose:
            traceback.print_exc()
        click.secho("mqproc: ", fg="red", nl=False, err=True, color=is_colored(invocation.color, sys.stderr))
        click.echo(escape_controls(text) if sys.stderr.isatty() else text, err=True)
    return exit_code


def _exit_code_of(error: OSError, invocation: Invocation) -> int:
    if isinstance(error, FileNotFoundError):
        return NOT_FOUND
    if isinstance(error, PermissionError) and isinstance(error.filename, str):
        with contextlib.suppress(MqprocError, click.ClickException, OSError):
            store, _ = invocation.find_store()
            if store is not None and Path(error.filename).absolute().is_relative_to(store):
                return StoreAccessError.exit_code
    return 1


# Exit on signals

_EXIT_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
_RESEND_S: Final = 0.01
_mask_before_fork: set[signal.Signals] | set[int] = set()
_is_unblocking = False


def exit_on_signals() -> None:
    """Raise SystemExit(128 + number) in the main thread on SIGTERM and SIGHUP.

    So commands clean up: without this a benchmark would leave its group, and an export half a file. Ignored signals, as
    under nohup, stay ignored. Forked children keep the default action. `mqproc top` and the supervisor have their own
    handlers.
    """
    for number in _EXIT_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _raise_exit)
    os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_restore_default_action)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    if _is_unblocking:
        # Python ignores exceptions raised in an at-fork hook: send the signal again after it.
        threading.Timer(_RESEND_S, os.kill, (os.getpid(), number)).start()
        return
    raise SystemExit(128 + number)


def _block_signals() -> None:
    # The child would lose a signal that arrives between the fork and its change of handlers.
    global _mask_before_fork
    _mask_before_fork = signal.pthread_sigmask(signal.SIG_BLOCK, _EXIT_SIGNALS)


def _unblock_signals() -> None:
    global _is_unblocking
    _is_unblocking = True
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask_before_fork)
    finally:
        _is_unblocking = False


def _restore_default_action() -> None:
    for number in _EXIT_SIGNALS:
        if signal.getsignal(number) is _raise_exit:
            signal.signal(number, signal.SIG_DFL)
    _unblock_signals()


def _exit_now(text: str, code: int) -> NoReturn:
    """Exit without unwinding the stack, after a bus error."""
    with contextlib.suppress(OSError):
        os.write(STDERR, f"mqproc: {text}\n".encode())
    os._exit(code)


# Standard streams


def _open_closed_streams() -> None:
    """Open /dev/null for standard streams that the caller closed (`>&-`).

    Otherwise the next file that is opened, one of the store's, would get their number.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = open(STDOUT, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(STDERR, "w", closefd=False)  # noqa: SIM115


class _NamedStdout(io.FileIO):
    """Standard output that is named in write errors, unlike a full disk of the store."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = _OUTPUT
            raise


def _name_stdout_in_errors() -> None:
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):
        return
    raw = _NamedStdout(out.fileno(), "w", closefd=False)
    # python -u does not buffer.
    buffer = raw if isinstance(out.buffer, io.RawIOBase) else io.BufferedWriter(raw)
    sys.stdout = io.TextIOWrapper(
        buffer, out.encoding, out.errors, line_buffering=out.line_buffering, write_through=out.write_through
    )


def _escape_unencodable() -> None:
    """Print characters that stdout's encoding lacks as JSON escapes instead of failing."""
    codecs.register_error("json", _json_escape)
    out = sys.stdout
    # The C locale's "surrogateescape" fails like "strict" if Python may not replace ASCII by UTF-8.
    if isinstance(out, io.TextIOWrapper) and (out.errors == "strict" or codecs.lookup(out.encoding).name == "ascii"):
        out.reconfigure(errors="json")


def _json_escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
