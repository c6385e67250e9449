"""One call of the command line: what the common options said, and what follows from them.

Precedence: flag, then environment, then config file, then default.
"""

from __future__ import annotations

import math
import os
import stat
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqproc.cli.output import Output
from mqproc.errors import ConfigurationError, StoreAccessError, StoreNotFoundError
from mqproc.paths import StorePaths, file_type, in_shell, lost_link

if TYPE_CHECKING:
    from mqproc.client import Client
    from mqproc.config import Options, Setting

DEFAULT_CONFIG = "mqproc.toml"
DEFAULT_TIMEOUT_S = 10.0
# Of /proc/<pid>/stat, counted from the state, which follows the name.
_START_FIELD = 19


def process_began_s() -> float:
    """When this process began, in monotonic seconds, to a tick of the system: an interpreter's own start counts."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[_START_FIELD])
    except OSError:
        return time.monotonic()  # Without /proc, as in a bare chroot.
    lived_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - lived_s


@dataclass(slots=True)
class Invocation:
    """What was said by common options; the methods make what commands need."""

    store: Path | None = None
    config: Path | None = None
    set_: list[str] = field(default_factory=list)
    output: str = ""
    timeout: float = DEFAULT_TIMEOUT_S
    timeout_given: bool = False
    color: str = "auto"
    verbose: bool = False
    began_s: float = field(default_factory=time.monotonic)

    def take(self, name: str, value: Any) -> None:
        """An option's value; a later one wins, `--set` collects."""
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

    def ends_s(self) -> float:
        """When a command ends that goes on by itself, in monotonic seconds: at a --timeout that was given, or never."""
        return self.began_s + self.timeout if self.timeout_given else math.inf

    def config_file(self) -> Path | None:
        """The config file: --config, MQPROC_CONFIG, ./mqproc.toml if it is there.

        Once one was found it is always that one: a group whose file has gone must not fall back to defaults.
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
        """The store's folder, absolute. Raises a usage error that tells how to name one."""
        named, _ = self.find_store()
        if named is None:
            from mqproc.environment import environment_warnings

            ways = f'give --store DIR, set MQPROC_STORE, or write store = "DIR" into {DEFAULT_CONFIG}'
            raise click.UsageError("; ".join([f"no store is named: {ways}", *environment_warnings(os.environ)]))
        return named

    def find_store(self) -> tuple[Path | None, str]:
        """The store's folder if one is named, and where it was named."""
        if self.store is not None:
            return self.store.absolute(), "--store"
        if from_environment := os.environ.get("MQPROC_STORE"):
            return Path(from_environment).absolute(), "MQPROC_STORE"
        file = self.config_file()
        if file is not None and (from_file := _store_in(file)):
            return file.absolute().parent / _at_home(from_file, file), str(file)
        return None, ""

    def paths(self) -> StorePaths:
        """The store's files."""
        return StorePaths(self.store_path())

    def existing_paths(self) -> StorePaths:
        """The same; raises StoreNotFoundError when there is no such folder."""
        paths = self.paths()
        check_no_file(paths.root)
        if not stat.S_ISDIR(file_type(paths.root)):
            from mqproc.cli.beginning import check_not_beginning

            check_not_beginning(paths)
            makes = f"no such folder; mqproc up --store {in_shell(paths.root)} makes a store there"
            raise StoreNotFoundError(f"{paths.root}: {lost_link(paths.root) or makes}")
        return paths

    def settings(self) -> dict[str, Setting]:
        """Every option with its value and where it was set."""
        from mqproc.config import load_settings

        return load_settings(self.config_file(), self.set_)

    def options(self) -> Options:
        """The checked options."""
        from mqproc.config import options_from

        return options_from(self.settings())

    def client(self) -> Client:
        """A client of the running group. Raises NotRunningError when none runs."""
        from mqproc.client import Client

        return Client(self.existing_paths().root, timeout=self.timeout)


def check_no_file(store: Path) -> None:
    """Raises StoreAccessError for a store that is a file."""
    if stat.S_ISREG(file_type(store)):
        raise StoreAccessError(f"{store}: a file; --store takes the folder that holds a store's files")


def _store_in(file: Path) -> str:
    """The `store` of a TOML file, or RocketMQ's `storePathRootDir` of a broker.conf."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix != ".toml":
            return _root_of_broker_conf(text)
        found = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{file}: {error}") from None
    from mqproc.config import options_table

    store = options_table(found, file).get("store", "")
    if not isinstance(store, str):
        raise ConfigurationError(f"{file}: store = {store!r} is not text")
    return store


def _at_home(store: str, file: Path) -> Path:
    try:
        return Path(store).expanduser()
    except RuntimeError as error:  # A user who has no home, or is none.
        raise ConfigurationError(f"{file}: {store!r}: {error}") from None


def _root_of_broker_conf(text: str) -> str:
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "storePathRootDir":
            return value.strip()
    return ""


pass_invocation = click.make_pass_decorator(Invocation, ensure=True)
