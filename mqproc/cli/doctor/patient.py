"""What is looked at: a machine, options, and perhaps a store, whose group lives or not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqproc import control_words
from mqproc.cli.doctor.host import Host
from mqproc.cli.invocation import Invocation, check_no_file
from mqproc.config import FIELDS, Options, Setting, options_from
from mqproc.errors import ConfigurationError, CorruptStoreError, NotRunningError, OtherVersionError
from mqproc.io import StoreIO
from mqproc.ipc.lock import Holder, holder_of
from mqproc.paths import StorePaths, in_shell
from mqproc.store.settings import read_values

if TYPE_CHECKING:
    from mqproc.store.verify.inventory import Inventory


@dataclass(frozen=True, slots=True)
class Patient:
    """Everything that checks look at, taken at one moment."""

    host: Host
    io: StoreIO
    settings: Mapping[str, Setting]
    options: Options
    """What a start with these settings uses; what nobody has set is what the store's last start used."""
    config_file: Path | None
    paths: StorePaths | None
    """None when no store is named; the folder need not be there."""
    reachable: bool
    """False when the store is there and this user may not look into it."""
    words: Mapping[str, int] | None
    """The control file's, of a group that lives or lived."""
    other_version: str
    """What is said of a control file that another version of mqproc has made, empty when none has."""
    holder: Holder | None
    """Who has the store's lock."""
    running: bool
    used: Mapping[str, Any]
    """The options that the group runs with, or ran with last; those that its file tells."""
    inventory: Inventory | None
    """The store's files by name and length; None without a store."""

    @property
    def supervisor_pid(self) -> int:
        """0 when no group runs."""
        return self.words["supervisor_pid"] if self.running and self.words else 0

    @property
    def held(self) -> bool:
        """Whether somebody runs the store, be it another version of mqproc or RocketMQ: its files change."""
        return self.holder is not None and not self.holder.ended

    @property
    def place(self) -> Path:
        """The folder of the store, or the nearest one above it that is there."""
        folder = self.paths.root if self.paths else Path.cwd()
        while not os.path.isdir(folder):
            folder = folder.parent
        return folder

    @property
    def named(self) -> str:
        """The store's folder as a word of a command."""
        return in_shell(self.paths.root) if self.paths else "DIR"

    @property
    def store_flag(self) -> str:
        """`--store DIR`, for commands that are to be repeated."""
        return f"--store {self.named}"

    def said(self, name: str) -> bool:
        """Whether somebody has set an option."""
        return self.settings[name].source != "default"

    def set_options(self, **values: object) -> str:
        """What to do to set options: in the config file where there is one, else by flags."""
        file = self.config_file
        if file is not None and file.suffix == ".toml":
            lines = ", ".join(f"{name} = {_toml(value)}" for name, value in values.items())
            return f"write {lines} into {file}{self._taken_by(values)}"
        flags = " ".join(f"--set {name}={value}" for name, value in values.items())
        start = f"mqproc up {self.store_flag} {flags}"
        return f"{self.stop_first}{start}"

    def _taken_by(self, names: Iterable[str]) -> str:
        """What makes a running group go by a changed file."""
        if not self.running:
            return ""
        return f", then {self.taking_up(names)}"

    def taking_up(self, names: Iterable[str]) -> str:
        """How the running group gets changed options: by a signal where it can have them so, else by a new start."""
        reloads = all(FIELDS[name].metadata["reload"] for name in names)
        return f"kill -HUP {self.supervisor_pid}" if reloads and not self._at_terminal else self.restart

    @property
    def _at_terminal(self) -> bool:
        """Whether the group runs at a terminal: to it a SIGHUP says that the terminal is closed, and it ends."""
        try:
            stdin = os.readlink(f"/proc/{self.supervisor_pid}/fd/0")
        except OSError:
            # Whose group it is, we cannot tell; a new start is right for all.
            return True
        return stdin.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))

    @property
    def stop(self) -> str:
        return f"mqproc down {self.store_flag}"

    @property
    def stop_first(self) -> str:
        """What stands before a command that wants the store for itself."""
        return f"{self.stop}; " if self.running else ""

    @property
    def restart(self) -> str:
        return f"{self.stop}; mqproc up {self.store_flag}"


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def look_at(invocation: Invocation, host: Host | None = None) -> Patient:
    """The patient that a command line names. Raises ConfigurationError, StoreAccessError."""
    io = StoreIO()
    root, _ = invocation.find_store()
    if root is not None:
        check_no_file(root)
    paths = StorePaths(root) if root is not None else None
    settings = invocation.settings()
    options_from(settings)
    used = _used(io, paths) if paths else {}
    # As a start with these settings would have them; what nobody has set is what the last start had.
    said = {name: setting.value for name, setting in settings.items() if setting.source != "default"}
    options = Options(**{**used, **said})
    reachable = paths is None or _may_look_into(paths)
    words, other_version = _words(paths) if paths else (None, "")
    holder = holder_of(io, paths) if paths and reachable else None
    return Patient(
        host=host or Host(),
        io=io,
        settings=settings,
        options=options,
        config_file=invocation.config_file(),
        paths=paths,
        reachable=reachable,
        words=words,
        other_version=other_version,
        holder=holder,
        running=holder is not None and words is not None and control_words.is_alive(words, time.monotonic_ns()),
        used=used,
        inventory=_inventory(io, paths, options, holder) if paths and reachable and os.path.isdir(paths.root) else None,
    )


def _may_look_into(paths: StorePaths) -> bool:
    """Whether this user may list the store's folder and ours in it, or there is none yet."""
    if not os.path.isdir(paths.root):
        # Nothing can be said of a folder behind a closed one: then it is taken for not there.
        return True
    folders = (paths.root, paths.own) if os.access(paths.root, os.X_OK) else (paths.root,)
    return all(os.access(folder, os.R_OK | os.X_OK) for folder in folders if os.path.isdir(folder))


def _words(paths: StorePaths) -> tuple[Mapping[str, int] | None, str]:
    try:
        return control_words.read_words(paths), ""
    except OtherVersionError as error:
        return None, str(error)
    except (NotRunningError, CorruptStoreError, OSError):
        return None, ""


def _used(io: StoreIO, paths: StorePaths) -> dict[str, Any]:
    """What a start has written down; nothing when that cannot be read, which the store's own check tells."""
    try:
        return read_values(io, paths)
    except (OSError, ValueError, ConfigurationError):
        return {}


def _inventory(io: StoreIO, paths: StorePaths, options: Options, holder: Holder | None) -> Inventory:
    from mqproc.store.verify.inventory import take_inventory
    from mqproc.store.verify.verifier import sizes_of

    was_killed = holder is None and io.exists(paths.abort)
    return take_inventory(io, paths, sizes_of(io, paths, options), was_killed=was_killed)
