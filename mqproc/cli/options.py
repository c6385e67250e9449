"""Common options of every command, and the click types, commands and groups that use them.

`mqproc --help` and `mqproc stat` must start quickly: groups import commands on demand, and this module imports the
client and the store only where it needs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from mqproc.cli.output import COLORS, FORMATS, Output
from mqproc.config.options import FIELDS, Options, Profile
from mqproc.config.parse import (
    Setting,
    check_supported,
    check_together,
    environment_warnings,
    load_settings,
    options_from,
    read_table,
)
from mqproc.errors import ConfigurationError, MqprocError, StoreAccessError, StoreNotFoundError
from mqproc.io.store_io import StoreIO
from mqproc.paths import StorePaths, dangling_link, file_type, shell_quoted
from mqproc.util.units import check_duration_ms, is_duration, parse_duration_ms, parse_size, parse_time_ms

if TYPE_CHECKING:
    from mqproc.client import Client
    from mqproc.types import Filter

DEFAULT_CONFIG = "mqproc.toml"
DEFAULT_STORE = "mqproc-store"
DEFAULT_TIMEOUT_S = 10.0
COMMON_HEADING = "Common options"
EXIT_CHANGES: Final = 2
# Index of the start time among the fields of /proc/<pid>/stat that follow the process name.
_START_FIELD: Final = 19
# Names that other tools use for a command.
_SYNONYMS: Final = {"start": "up", "stop": "down", "help": "--help"}
# Needed only by a group that starts. A broker.conf of RocketMQ may name a host that does not exist here.
_SUPERVISOR: Final = "mqproc:superv"
"""Beginning of the name of supervisors among processes, see `roles.role.set_title`."""
_ROLE_OPTIONS: Final = frozenset({"broker_ip", "broker_name"})
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


# Invocation


def process_start_s() -> float:
    """The start of this process and its interpreter in monotonic seconds, to one clock tick."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[_START_FIELD])
    except OSError:
        return time.monotonic()  # There is no /proc, as in a bare chroot.
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


@dataclass(slots=True)
class Invocation:
    """Values of the common options; the methods derive what commands need.

    Precedence: flag, environment, config file, default. The default store is that of this user's only running group,
    else `./mqproc-store`.
    """

    store: Path | None = None
    config: Path | None = None
    set_: list[str] = field(default_factory=list)
    output: str = ""
    timeout: float = DEFAULT_TIMEOUT_S
    timeout_given: bool = False
    color: str = "auto"
    verbose: bool = False
    detailed_exitcode: bool = False
    start_s: float = field(default_factory=time.monotonic)
    default_profile: Profile = Profile.SERVER
    is_store_shown: bool = False

    def set_option(self, name: str, value: Any) -> None:
        """Store an option's value. A later value replaces an earlier one; `--set` accumulates."""
        if name == "set_":
            self.set_ += value
        elif name == "json_":
            self.output = "json"
        else:
            setattr(self, name, value)
            self.timeout_given |= name == "timeout"

    @property
    def out(self) -> Output:
        return Output(self.output or "table", self.color)

    def plan_exit_code(self, has_changes: bool) -> int:
        """Exit code for a plan that is only shown: 0.

        With --detailed-exitcode it is 2 if the plan has changes, as in terraform.
        """
        return EXIT_CHANGES if self.detailed_exitcode and has_changes else 0

    def timeout_or(self, default_s: float) -> float:
        """The value of --timeout in seconds, else a default."""
        return self.timeout if self.timeout_given else default_s

    def deadline_s(self) -> float:
        """End of a command that runs until Ctrl-C or --timeout, in monotonic seconds."""
        return self.start_s + self.timeout_or(math.inf)

    def config_file(self) -> Path | None:
        """The config file: --config, MQPROC_CONFIG, or ./mqproc.toml if it exists.

        A file that was found once stays the config file: if it is deleted while a group runs, a reload must fail
        instead of using the defaults.
        """
        named = self.config or os.environ.get("MQPROC_CONFIG")
        if named:
            path = Path(named)
            kind = file_type(path)
            if not stat.S_ISREG(kind):
                raise ConfigurationError(f"{path}: {'not a regular file' if kind else 'no such file'}")
            return path
        default = Path(DEFAULT_CONFIG)
        if not stat.S_ISREG(file_type(default)):
            return None
        self.config = default
        return default

    def store_path(self) -> Path:
        """The store's folder, absolute; shown unless --store names it.

        Raises a usage error that lists the ways to name one.
        """
        found, source = self.find_store()
        if found is None:
            ways = f'give --store DIR, set MQPROC_STORE, or write store = "DIR" into {DEFAULT_CONFIG}'
            running = ", ".join(shell_quoted(store) for store in running_stores())
            reason = (
                f"several groups run ({running})" if running else f"no group runs, and ./{DEFAULT_STORE} is missing"
            )
            text = f"no store is named, {reason}: {ways}"
            raise click.UsageError("; ".join([text, *environment_warnings(os.environ)]))
        self._show_store(found, source)
        return found

    def _show_store(self, store: Path, source: str) -> None:
        """Show once which store a command uses if --store does not say so."""
        if source != "--store" and not self.is_store_shown:
            self.is_store_shown = True
            self.out.note(f"store: {store} ({source})")

    def find_store(self) -> tuple[Path | None, str]:
        """(the store's folder or None, the source that names it)."""
        found, source = self.named_store()
        if found is None and len(running := running_stores()) == 1:
            found, source = running[0], "the only running group"
        elif found is None and not running and os.path.isdir(DEFAULT_STORE):
            found, source = Path(DEFAULT_STORE).absolute(), "default"
        return found, source

    def named_store(self) -> tuple[Path | None, str]:
        """As `find_store`, without the running group's and the default."""
        if self.store is not None:
            return self.store.absolute(), "--store"
        if from_environment := os.environ.get("MQPROC_STORE"):
            return Path(from_environment).absolute(), "MQPROC_STORE"
        file = self.config_file()
        if file is not None and (from_file := _store_in(file)):
            try:
                return file.absolute().parent / Path(from_file).expanduser(), str(file)
            except RuntimeError as error:  # The user is unknown or has no home folder.
                raise ConfigurationError(f"{file}: {from_file!r}: {error}") from None
        return None, ""

    def paths(self) -> StorePaths:
        """Paths of the store's files."""
        return StorePaths(self.store_path())

    def paths_to_start(self) -> StorePaths:
        """Paths of the store of a group that starts: the named one, or `./mqproc-store`."""
        found, source = self.named_store()
        found, source = (found, source) if found is not None else (Path(DEFAULT_STORE).absolute(), "default")
        self._show_store(found, source)
        return StorePaths(found)

    def existing_paths(self) -> StorePaths:
        """As `paths`; raises StoreNotFoundError if the folder does not exist."""
        paths = self.paths()
        check_no_file(paths.root)
        if not stat.S_ISDIR(file_type(paths.root)):
            from mqproc.cli.admin.supervisor_client import check_not_starting

            check_not_starting(paths)
            hint = f"no such folder; mqproc up --store {shell_quoted(paths.root)} creates a store there"
            raise StoreNotFoundError(f"{paths.root}: {dangling_link(paths.root) or hint}")
        return paths

    def settings(self) -> dict[str, Setting]:
        """Every engine option with its value and source."""
        return load_settings(self.config_file(), self.set_, profile=self.default_profile)

    def options(self) -> Options:
        """The options of a start. Raises ConfigurationError, also for unsupported options."""
        options = options_from(self.settings())
        check_supported(self.config_file(), ignore=options.ignore_kvstore)
        return options

    def options_without_store(self) -> Options:
        """Engine options from flags, environment, config file and defaults."""
        return options_from(self._explicit_settings())

    def store_options(self, io: StoreIO, paths: StorePaths) -> Options:
        """Engine options, by default those in the store's `mqproc/settings.json`.

        A settings.json that cannot be read is ignored; `store verify` reports it. Raises ConfigurationError.
        """
        stored = {name: Setting(value, str(paths.settings)) for name, value in _stored_values(io, paths).items()}
        return options_from(stored | self._explicit_settings())

    def _explicit_settings(self) -> dict[str, Setting]:
        settings = self.settings()
        return {name: settings[name] for name in settings.keys() - _ROLE_OPTIONS if settings[name].is_explicit}

    def store_argument(self, io: StoreIO, folder: Path | None) -> StorePaths:
        """The store in the FOLDER argument, else the named one. Raises StoreAccessError."""
        from mqproc.store.access import check_is_store

        paths = StorePaths(folder.absolute()) if folder else self.paths()
        check_is_store(io, paths)
        return paths

    def client(self) -> Client:
        """A client of the running group. Raises NotRunningError if no group runs."""
        from mqproc.client import Client

        return Client(self.existing_paths().root, timeout=self.timeout)


def running_stores() -> list[Path]:
    """Stores on which this user runs groups: their supervisors have the lock files open."""
    import psutil

    stores: set[Path] = set()
    for process in psutil.process_iter(["name"]):
        if process.info["name"].startswith(_SUPERVISOR):
            with contextlib.suppress(psutil.Error):  # It has ended, or is another user's.
                files = [Path(file.path) for file in process.open_files()]
                stores.update(file.parent for file in files if file == StorePaths(file.parent).lock)
    return sorted(store for store in stores if _is_of_user(StorePaths(store)))


def _is_of_user(paths: StorePaths) -> bool:
    """Whether the store's own folder and its socket belong to this user."""
    try:
        return {path.lstat().st_uid for path in (paths.own, paths.socket("ctl"))} == {os.geteuid()}
    except OSError:
        return False


def check_no_file(store: Path) -> None:
    """Raise StoreAccessError if the store is a file."""
    if stat.S_ISREG(file_type(store)):
        raise StoreAccessError(f"{store}: a file; --store takes the folder that holds a store's files")


def _stored_values(io: StoreIO, paths: StorePaths) -> dict[str, Any]:
    from mqproc.store.access import read_values

    try:
        values = {name: value for name, value in read_values(io, paths).items() if name not in _ROLE_OPTIONS}
        check_together(dataclasses.replace(Options(), **values))
    except (OSError, ValueError, ConfigurationError):
        return {}
    return values


def _store_in(file: Path) -> str:
    """The `store` of a TOML file, or RocketMQ's `storePathRootDir` of a broker.conf."""
    if file.suffix == ".toml":
        store = read_table(file).get("store", "")
        if not isinstance(store, str):
            raise ConfigurationError(f"{file}: store = {store!r} is not text")
        return store
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: {error}") from None
    lines = (line.partition("=") for line in text.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "storePathRootDir"), "")


pass_invocation = click.make_pass_decorator(Invocation, ensure=True)


# Parameter types


class ParsedText(click.ParamType[T]):
    """Text that a function parses; its ValueError is a usage error."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> T:
        if not isinstance(value, str):
            parsed: T = value
            return parsed
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_seconds(text: str) -> float:
    """A duration in plain seconds, or with a unit: `500ms`, `15m`, `2h`. Raises ValueError."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        check_duration_ms(float(text) * 1000, text)
        seconds = float(text)
    else:
        seconds = parse_duration_ms(text) / 1000
    # The longest wait that Python supports: 292 years.
    return min(seconds, threading.TIMEOUT_MAX)


def parse_duration_s(text: str) -> float:
    """Seconds of a duration with a unit. Raises ValueError without a unit, except for 0."""
    if text.strip() == "0":
        return 0.0
    return min(parse_duration_ms(text) / 1000, threading.TIMEOUT_MAX)


def parse_start_relative_time(text: str) -> int | str:
    """A point in time for resumable work; a relative time stays text."""
    time_ms = parse_time_ms(text)
    text = text.strip()
    return text if is_duration(text) or text == "now" else time_ms


class RateRange(click.FloatRange):
    """A rate per second; NaN and infinity are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        rate: float = super().convert(value, param, ctx)
        if not math.isfinite(rate):
            self.fail(f"{value} is not a finite number", param, ctx)
        return rate


class NonEmptyPath(click.Path):
    """A path; empty text is refused, since Python takes it for the current folder."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if not os.fspath(value):
            self.fail("the path is empty; . is the current folder", param, ctx)
        return super().convert(value, param, ctx)


DURATION = ParsedText("duration", parse_duration_s)
SECONDS = ParsedText("duration", parse_seconds)
# ISO 8601, epoch ms, or an age, as Unix ms.
TIME = ParsedText("time", parse_time_ms)
START_RELATIVE_TIME = ParsedText("time", parse_start_relative_time)
# A number of bytes, plain or with a unit: 64KiB, 10MB, 1g.
SIZE = ParsedText("size", parse_size)
PATH = NonEmptyPath(path_type=Path)


# Shell completion. Names come from the store's settings files, so no group need run. After an error there are
# no completions, since a shell cannot show the error.


def _complete_name(file: str, table: str, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete a name from a table in one of the store's settings files."""
    from mqproc.store import rocketmq_json

    try:
        store, _ = ctx.ensure_object(Invocation).find_store()
        if store is None:
            return []
        value, _ = rocketmq_json.load(StoreIO(), getattr(StorePaths(store), file))
        return sorted(name for name in (value or {}).get(table, {}) if name.startswith(incomplete))
    except (MqprocError, click.ClickException, OSError, AttributeError):
        return []


complete_topic = functools.partial(_complete_name, "topics", "topicConfigTable")
complete_group = functools.partial(_complete_name, "subscription_groups", "subscriptionGroupTable")


def complete_setting(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of an engine option, followed by `=`."""
    return [f"{name}=" for name in FIELDS if name.startswith(incomplete)]


def complete_option(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of an engine option."""
    return [name for name in FIELDS if name.startswith(incomplete)]


# Commands and groups


def _store_value(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Copy a common option's value into the invocation if it was given at this level."""
    if value is not None and value != () and value is not False:
        assert parameter.name is not None
        context.ensure_object(Invocation).set_option(parameter.name, value)
    return value


def common_options() -> list[click.Parameter]:
    """The options that every command accepts, before or after its name."""

    def option(*names: str, **settings: Any) -> click.Option:
        return click.Option(names, expose_value=False, callback=_store_value, **settings)

    return [
        # The commands check that the file is readable, and doctor explains how to fix it.
        option(
            "--store",
            type=NonEmptyPath(path_type=Path, readable=False),
            metavar="DIR",
            help="The store; default: MQPROC_STORE, the config file, your only running group, ./mqproc-store.",
        ),
        option(
            "--config",
            type=PATH,
            metavar="FILE",
            help="TOML file or broker.conf; default: MQPROC_CONFIG, then ./mqproc.toml.",
        ),
        option(
            "--set",
            "set_",
            multiple=True,
            metavar="NAME=VALUE",
            shell_complete=complete_setting,
            help="Set an engine option; may be repeated. See mqproc config doc.",
        ),
        option("--output", type=click.Choice(FORMATS), help="Output format.  [default: table]"),
        option("--json", "json_", is_flag=True, help="Same as --output json."),
        option("--timeout", type=SECONDS, help="Stop waiting after this time.  [default: 10s]"),
        option("--color", type=click.Choice(COLORS), help="Use colours; auto honours NO_COLOR.  [default: auto]"),
        option("--verbose", is_flag=True, help="Show tracebacks of errors."),
    ]


class Command(click.Command):
    """A command with the common options, which its help lists in a separate section."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.own_params = list(self.params)
        names = {name for param in self.params for name in param.opts}
        self.params += [option for option in common_options() if not names.intersection(option.opts)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _format_options(self, ctx, formatter)


def command(name: str | None = None, *, group: click.Group | None = None) -> Callable[[Callable[..., Any]], Command]:
    """Decorate the function of a command; its first argument is the invocation."""

    def decorate(function: Callable[..., Any]) -> Command:
        made = click.command(name, cls=Command)(pass_invocation(function))
        if group is not None:
            group.add_command(made)
        return made

    return decorate


class CommandGroup(click.Group):
    """A group that imports a command when it is called, and suggests a name for a mistyped one.

    `lazy` maps a command's name to ("module:attribute", short help), so that `mqproc --help` starts quickly. A test
    compares the short help with the command's own. `aliases` are further names, which the help does not list.
    """

    command_class = Command

    def __init__(
        self,
        *arguments: Any,
        lazy: Mapping[str, tuple[str, str]] | None = None,
        aliases: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.lazy = dict(lazy or {})
        self.aliases = dict(aliases or {})
        self.own_params = list(self.params)
        self.params += common_options()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lazy, *(name for name in self.commands if name not in self.lazy)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = self.aliases.get(cmd_name, cmd_name)
        if cmd_name in self.lazy and cmd_name not in self.commands:
            module, _, attribute = self.lazy[cmd_name][0].partition(":")
            self.commands[cmd_name] = getattr(importlib.import_module(module), attribute)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            names = self.list_commands(ctx)
            synonym = _SYNONYMS.get(args[0], "")
            is_known = synonym in names or synonym in ctx.help_option_names
            near = [synonym] if is_known else difflib.get_close_matches(args[0], names, 1, 0.6)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
            ctx.fail(f"No such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List names and short helps without importing commands."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.commands.get(name)
            rows.append((name, self.lazy[name][1] if command is None else command.get_short_help_str(80)))
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def _format_options(command: Command | CommandGroup, ctx: click.Context, formatter: click.HelpFormatter) -> None:
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


# Options that several commands share


def grouped_options(name: str, group: Callable[..., Any], *options: Callable[[F], F]) -> Callable[[F], F]:
    """Add options whose values the command gets as one argument `name`, made by `group`."""
    parameters = tuple(inspect.signature(group).parameters)

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            own = {parameter: values.pop(parameter) for parameter in parameters}
            return function(**values, **{name: group(**own)})

        decorated = cast(F, call)
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


detailed_exitcode_option = click.option(
    "--detailed-exitcode",
    is_flag=True,
    expose_value=False,
    callback=_store_value,
    help="For a plan: exit code 2 if it has changes, else 0.",
)


def execute_option(function: F) -> F:
    """Add --execute, which the command gets as `execute`, and --detailed-exitcode."""
    execute = click.option("--execute", "--yes", "execute", is_flag=True, help="Execute the plan (default: show it).")
    return execute(detailed_exitcode_option(function))


folder_argument = click.argument("folder", required=False, type=PATH)
topics_option = click.option(
    "--topic",
    "topics",
    multiple=True,
    shell_complete=complete_topic,
    help="Only this topic; may be repeated.  [default: all]",
)
queues_option = click.option(
    "--queue", "queues", multiple=True, type=click.IntRange(0), help="Only this queue; may be repeated."
)


def filter_options(function: F) -> F:
    """Add --tag and --sql, the filters of a topic; the command gets `tags` and `sql`."""
    function = click.option(
        "--sql",
        default="",
        metavar="EXPR",
        help="Only messages whose properties match this SQL92 expression: price > 10 AND region IS NOT NULL.",
    )(function)
    return click.option("--tag", "tags", default="", metavar="EXPR", help="Only messages with these tags: a || b.")(
        function
    )


# A single | next to a blank or at an end is a mistyped ||.
_LONE_BAR: Final = re.compile(r"(?<!\S)\||\|(?!\S)")


def filter_of(tags: str, sql: str) -> Filter | None:
    """The filter for the values of `filter_options`, None for all messages."""
    from mqproc.types import SqlFilter, TagFilter

    if tags.strip() not in ("", "*"):
        for tag in map(str.strip, tags.split("||")):
            if not tag or _LONE_BAR.search(tag):
                raise click.UsageError(f"--tag {tags!r}: {tag!r} is not a tag; || separates tags: 'a || b'")
    if tags and sql:
        raise click.UsageError("--tag and --sql exclude each other; in SQL the tag is a property: --sql \"TAGS = 'a'\"")
    if sql:
        return SqlFilter(sql)
    return TagFilter(tags) if tags else None


def replay_options(function: F) -> F:
    """Add --to and --rate of a replay; the command gets `to` and `rate`, 0 for no limit."""
    function = click.option(
        "--rate",
        type=RateRange(0),
        default=0.0,
        metavar="N",
        help="At most N messages per second.  [default: no limit]",
    )(function)
    return click.option(
        "--to",
        required=True,
        metavar="TOPIC",
        shell_complete=complete_topic,
        help="Topic to send them to; it is created if missing.",
    )(function)
