"""Click's commands with our manners: options that every command has, groups loaded when needed, suggestions.

`mqproc --help` and `mqproc stat` must start at once, so a group knows its commands by module name and short help only;
a test compares these with what the commands say themselves.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from mqproc.cli import times
from mqproc.cli.completing import complete_setting
from mqproc.cli.invocation import Invocation
from mqproc.cli.output import COLORS, FORMATS
from mqproc.quantities import parse_size

COMMON_HEADING = "Common options"
# What other tools call it.
_CALLED_ELSEWHERE = {"start": "up", "stop": "down", "help": "--help"}


class Seconds(click.ParamType[float]):
    """A time span: plain seconds, or `500ms`, `15m`, `2h`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        try:
            if re.fullmatch(r"\d+(\.\d+)?", text):
                times.check_duration_ms(float(text) * 1000, text)
                seconds = float(text)
            else:
                seconds = times.parse_duration_ms(text) / 1000
        except ValueError as error:
            self.fail(str(error), param, ctx)
        # Nobody can wait longer: 292 years.
        return min(seconds, threading.TIMEOUT_MAX)


class Rate(click.FloatRange):
    """So many a second, `min` or more; not a number and infinity are no rates."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        rate: float = super().convert(value, param, ctx)
        if not math.isfinite(rate):
            self.fail(f"{value} is no number that can be counted to", param, ctx)
        return rate


class Moment(click.ParamType[int]):
    """A moment as Unix milliseconds: ISO 8601, epoch ms, or how long ago."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return times.parse_time_ms(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class LaterMoment(click.ParamType["int | str"]):
    """A moment of a work that is gone on with: one relative to now stays the text, which counts from the work's start.

    So the same command means the same messages, however much later it is given again.
    """

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        moment_ms = MOMENT.convert(value, param, ctx)
        text = str(value).strip()
        return text if times.is_duration(text) or text == "now" else moment_ms


class Size(click.ParamType[int]):
    """Bytes: a number, or one with unit: `64KiB`, `10MB`, `1g`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class NamedPath(click.Path):
    """A file or folder. An empty name, as of a variable that is not set, is none: Python means the current folder."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if not os.fspath(value):
            self.fail("the path is empty; . is the current folder", param, ctx)
        return super().convert(value, param, ctx)


SECONDS = Seconds()
MOMENT = Moment()
LATER_MOMENT = LaterMoment()
SIZE = Size()
PATH = NamedPath(path_type=Path)


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Put a common option's value into the invocation, if it was given at this level."""
    if value is not None and value != () and value is not False:
        assert parameter.name is not None
        context.ensure_object(Invocation).take(parameter.name, value)
    return value


def common_options() -> list[click.Parameter]:
    """The options that may stand before or after every command's name."""

    def option(*names: str, **settings: Any) -> click.Option:
        return click.Option(names, expose_value=False, callback=_keep, **settings)

    return [
        # A store that may not be read is told of by who wants to read it: doctor says what mends that.
        option(
            "--store",
            type=NamedPath(path_type=Path, readable=False),
            metavar="DIR",
            help="Store; else MQPROC_STORE, else the config file's.",
        ),
        option("--config", type=PATH, metavar="FILE", help="TOML or broker.conf; else MQPROC_CONFIG, ./mqproc.toml."),
        option(
            "--set",
            "set_",
            multiple=True,
            metavar="NAME=VALUE",
            shell_complete=complete_setting,
            help="Set any option; see mqproc config doc.",
        ),
        option("--output", type=click.Choice(FORMATS), help="Shape of the data; table is the default."),
        option("--json", "json_", is_flag=True, help="The same as --output json."),
        option("--timeout", type=SECONDS, help="Give up waiting after this long.  [default: 10s]"),
        option("--color", type=click.Choice(COLORS), help="Colours; auto is the default, and NO_COLOR is heard."),
        option("--verbose", is_flag=True, help="Show tracebacks of errors."),
    ]


class Command(click.Command):
    """A command that also has the common options, told apart in its help."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.own_params = list(self.params)
        names = {name for param in self.params for name in param.opts}
        self.params += [option for option in common_options() if not names.intersection(option.opts)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _format_options(self, ctx, formatter)


class Group(click.Group):
    """A group whose commands are loaded when they are called; a mistyped one brings a suggestion.

    `lazy` maps a command's name to ("module:attribute", short help).
    """

    command_class = Command

    def __init__(self, *arguments: Any, lazy: Mapping[str, tuple[str, str]] | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.lazy = dict(lazy or {})
        self.own_params = list(self.params)
        self.params += common_options()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lazy, *(name for name in self.commands if name not in self.lazy)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy and cmd_name not in self.commands:
            module, _, attribute = self.lazy[cmd_name][0].partition(":")
            self.commands[cmd_name] = getattr(importlib.import_module(module), attribute)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            names = self.list_commands(ctx)
            elsewhere = _CALLED_ELSEWHERE.get(args[0], "")
            is_here = elsewhere in names or elsewhere in ctx.help_option_names
            near = [elsewhere] if is_here else difflib.get_close_matches(args[0], names, 1, 0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
            ctx.fail(f"No such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Names and short helps, without loading what is not loaded."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.commands.get(name)
            rows.append((name, self.lazy[name][1] if command is None else command.get_short_help_str(80)))
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _format_options(command: Command | Group, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    own: list[tuple[str, str]] = []
    common: list[tuple[str, str]] = []
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
        if record is not None:
            (own if param in command.own_params or param.name == "help" else common).append(record)
    for heading, records in (("Options", own), (COMMON_HEADING, common)):
        if records:
            with formatter.section(heading):
                formatter.write_dl(records)
