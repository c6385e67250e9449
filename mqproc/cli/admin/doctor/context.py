"""What is looked at: a machine, options, and perhaps a store, whose group lives or not."""

from __future__ import annotations

import ctypes
import enum
import os
import platform
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqproc.cli.options import Invocation, check_no_file
from mqproc.config.options import FIELDS, Options
from mqproc.config.parse import Setting, options_from
from mqproc.errors import ConfigurationError, CorruptStoreError, NotRunningError, OtherVersionError
from mqproc.io.store_io import StoreIO
from mqproc.ipc import control_words
from mqproc.ipc.store_lock import LockHolder, lock_holder
from mqproc.paths import StorePaths, in_shell
from mqproc.store.settings import read_values

if TYPE_CHECKING:
    from mqproc.store.verify.inventory import Inventory

# --- host ---
# What the kernel says of this machine (/proc, /sys, its clock), and how Python was built. Nothing is changed.


_TIME_ERROR: Final = 5
_UNLIMITED: Final = 1 << 62
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_TIMEX_BYTES: Final = 1024
"""More than struct timex has anywhere; its first word, `modes`, is 0: only ask."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system, as /proc/self/mountinfo has it."""

    point: str
    kind: str
    source: str
    options: frozenset[str]


def clock_is_synchronized() -> bool | None:
    """Whether something keeps the clock right, by the kernel; None where it does not tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    question = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        state = int(libc.adjtimex(question))
    except AttributeError:
        return None
    return None if state < 0 else state != _TIME_ERROR


@dataclass(frozen=True, slots=True)
class PythonBuild:
    """How the Python that runs this was built; `arguments` are those of its `configure`."""

    version: str
    prefix: str
    arguments: str
    is_debug: bool = False

    @property
    def is_optimized(self) -> bool:
        """Whether profiles of its own runs went into it. Distributions do that without an argument that tells of it."""
        return "--enable-optimizations" in self.arguments or self.prefix == "/usr"


def python_build() -> PythonBuild:
    """This Python."""
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return PythonBuild(platform.python_version(), sys.base_prefix, arguments, hasattr(sys, "gettotalrefcount"))


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, by the files in which its kernel tells of itself, and the Python on it."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    clock_synchronized: bool | None = field(default_factory=clock_is_synchronized)
    python: PythonBuild = field(default_factory=python_build)

    def text(self, path: Path) -> str:
        """A small file's text; "" when there is no such file, or it may not be read."""
        try:
            return path.read_text(errors="replace").strip()
        except OSError:
            return ""

    def setting(self, name: str) -> int | None:
        """A kernel setting by its name below /proc/sys: `vm/swappiness`. None when this kernel has none."""
        words = self.text(self.proc / "sys" / name).split()
        return int(words[0]) if words and words[0].lstrip("-").isdigit() else None

    def memory(self) -> dict[str, int]:
        """/proc/meminfo in bytes: MemTotal, MemAvailable, SwapTotal…"""
        found = {}
        for line in self.text(self.proc / "meminfo").splitlines():
            name, _, rest = line.partition(":")
            number = rest.split()
            if number and number[0].isdigit():
                found[name] = int(number[0]) * (1024 if "kB" in rest else 1)
        return found

    def limit(self, name: str, pid: int = 0) -> tuple[int, int] | None:
        """A process's (soft, hard) limit by its name in /proc/PID/limits: `Max open files`."""
        for line in self.text(self.proc / (str(pid) if pid else "self") / "limits").splitlines():
            if line.startswith(name):
                soft, hard = (
                    _UNLIMITED if word == "unlimited" else int(word) for word in line[len(name) :].split()[:2]
                )
                return soft, hard
        return None

    def swapped_bytes(self, pid: int) -> int:
        """How much of a process lies in swap."""
        found = re.search(r"^VmSwap:\s+(\d+) kB", self.text(self.proc / str(pid) / "status"), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0

    def mount_of(self, path: Path) -> Mount | None:
        """The file system that a path lies on."""
        best: Mount | None = None
        wanted = os.fspath(path.resolve())
        for line in self.text(self.proc / "self" / "mountinfo").splitlines():
            mount = _parse_mount(line)
            if mount is None or not _below(wanted, mount.point):
                continue
            # Of two at one point the later one hides the earlier.
            if best is None or len(mount.point) >= len(best.point):
                best = mount
        return best

    def cgroup(self, name: str, old_name: str) -> str:
        """A limit of the container that this runs in, by its names in cgroup 2 and 1; "" without any."""
        for root in (self.sys / "fs/cgroup", self.sys / "fs/cgroup/unified"):
            for folder in self._cgroup_folders():
                if text := self.text(root / folder / name):
                    return text
        return self.text(self.sys / "fs/cgroup" / old_name)

    def _cgroup_folders(self) -> list[str]:
        own = [line[3:].lstrip("/") for line in self.text(self.proc / "self/cgroup").splitlines() if line[:3] == "0::"]
        return [*own, ""]

    def processors(self) -> int:
        """Processors that this process may use."""
        return len(os.sched_getaffinity(0))

    def processor_features(self) -> frozenset[str]:
        """Flags of the first processor; none where the kernel lists none."""
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", self.text(self.proc / "cpuinfo"), re.MULTILINE)
        return frozenset(found[1].split()) if found else frozenset()


def _below(path: str, point: str) -> bool:
    return point == "/" or path == point or path.startswith(point + "/")


def _parse_mount(line: str) -> Mount | None:
    """`36 35 98:0 /root /point rw,noatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro`."""
    first, separator, last = line.partition(" - ")
    fields, more = first.split(), last.split()
    if not separator or len(fields) < 6 or len(more) < 3:
        return None
    options = frozenset(fields[5].split(",")) | frozenset(more[2].split(","))
    point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[4])
    return Mount(point, more[0], more[1], options)


@dataclass(frozen=True, slots=True)
class DoctorContext:
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
    holder: LockHolder | None
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


def look_at(invocation: Invocation, host: Host | None = None) -> DoctorContext:
    """The context that a command line names. Raises ConfigurationError, StoreAccessError."""
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
    holder = lock_holder(io, paths) if paths and reachable else None
    return DoctorContext(
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
        running=holder is not None and words is not None and control_words.supervisor_alive(words, time.monotonic_ns()),
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


def _inventory(io: StoreIO, paths: StorePaths, options: Options, holder: LockHolder | None) -> Inventory:
    from mqproc.store.verify.inventory import take_inventory
    from mqproc.store.verify.verifier import sizes_of

    was_killed = holder is None and io.exists(paths.abort)
    return take_inventory(io, paths, sizes_of(io, paths, options), was_killed=was_killed)


# --- finding ---
# What a check says: how bad it is, what it found, why that matters, and what mends it.


class Level(enum.StrEnum):
    """An error keeps the store from working, a warning will hurt some day; a note is good to know."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


ORDER = (Level.ERROR, Level.WARNING, Level.NOTE, Level.OK)
"""The worst first."""


_INSIDE = ("store", "group")
"""Areas of checks that look into the store."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one look has brought. `mend` is a command or an option, exactly as it is to be given."""

    level: Level
    found: str
    why: str = ""
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The same with the name of the check that said it."""

    check: str
    area: str
    level: Level
    found: str
    why: str
    mend: str

    def to_json(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "area": self.area,
            "level": str(self.level),
            "found": self.found,
            "why": self.why,
            "mend": self.mend,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """One question. `look` gives None where the question makes no sense: there is no store, no such file."""

    name: str
    area: str
    asks: str
    look: Callable[[DoctorContext], Said | None]

    def run(self, context: DoctorContext) -> Finding | None:
        if self.area in _INSIDE and not context.reachable:
            return None  # What its owner is told by `owner`.
        try:
            said = self.look(context)
        except OSError as problem:
            said = error(
                f"it could not be looked at: {problem}",
                "what this check is about is not known, and a group may meet the same",
                "dmesg tells of a disk that fails; ls -l and df -h of what could not be read",
            )
        if said is None:
            return None
        return Finding(self.name, self.area, said.level, said.found, said.why, said.mend)


def ok(found: str) -> Said:
    """All is as it should be."""
    return Said(Level.OK, found)


def note(found: str, why: str, mend: str) -> Said:
    """Good to know."""
    return Said(Level.NOTE, found, why, mend)


def warning(found: str, why: str, mend: str) -> Said:
    """It will hurt."""
    return Said(Level.WARNING, found, why, mend)


def error(found: str, why: str, mend: str) -> Said:
    """It does not work."""
    return Said(Level.ERROR, found, why, mend)
