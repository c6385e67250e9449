"""Input of the doctor's checks (machine, options, store, group), and their findings."""

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqproc.cli.options import Invocation, check_no_file
from mqproc.cli.output import encode_json
from mqproc.config.options import FIELDS, Options
from mqproc.config.parse import Setting, options_from
from mqproc.errors import ConfigurationError, CorruptStoreError, NotRunningError, OtherVersionError
from mqproc.io.store_io import StoreIO
from mqproc.ipc import control_words
from mqproc.ipc.store_lock import LockHolder, lock_holder
from mqproc.paths import StorePaths, existing_folder, shell_quoted
from mqproc.store.access import read_values

if TYPE_CHECKING:
    from mqproc.store.verify.inventory import Inventory

# The machine


_TIME_ERROR: Final = 5
_UNLIMITED: Final = 1 << 62
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_TIMEX_BYTES: Final = 1024
"""Larger than struct timex on any platform; its first word, `modes`, is 0: read only."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system, from /proc/self/mountinfo."""

    point: str
    kind: str
    source: str
    options: frozenset[str]


def clock_is_synchronized() -> bool | None:
    """Whether the kernel's clock is synchronized, None if unknown."""
    libc = ctypes.CDLL(None, use_errno=True)
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        state = int(libc.adjtimex(timex))
    except AttributeError:
        return None
    return None if state < 0 else state != _TIME_ERROR


@dataclass(frozen=True, slots=True)
class PythonBuild:
    """Build of the running Python; `arguments`: arguments of its `configure`."""

    version: str
    prefix: str
    arguments: str
    is_debug: bool = False

    @property
    def is_optimized(self) -> bool:
        """Whether Python was built with profile-guided optimization, as by all distributions."""
        return "--enable-optimizations" in self.arguments or self.prefix == "/usr"


def python_build() -> PythonBuild:
    """The build of this Python."""
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    return PythonBuild(platform.python_version(), sys.base_prefix, arguments, hasattr(sys, "gettotalrefcount"))


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: its /proc and /sys, its clock and its Python. Tests use other folders."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    clock_synchronized: bool | None = field(default_factory=clock_is_synchronized)
    python: PythonBuild = field(default_factory=python_build)

    def text(self, path: Path) -> str:
        """The text of a small file; "" if it is missing or unreadable."""
        try:
            return path.read_text(errors="replace").strip()
        except OSError:
            return ""

    def setting(self, name: str) -> int | None:
        """A kernel setting by its name in /proc/sys, such as `vm/swappiness`; None if it is missing."""
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
        """Swapped memory of a process."""
        found = re.search(r"^VmSwap:\s+(\d+) kB", self.text(self.proc / str(pid) / "status"), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0

    def mount_of(self, path: Path) -> Mount | None:
        """The mount of a path."""
        best: Mount | None = None
        resolved = path.resolve()
        for line in self.text(self.proc / "self" / "mountinfo").splitlines():
            mount = _parse_mount(line)
            if mount is None or not resolved.is_relative_to(mount.point):
                continue
            # A later mount at the same point hides an earlier one.
            if best is None or len(mount.point) >= len(best.point):
                best = mount
        return best

    def cgroup(self, name: str, old_name: str) -> str:
        """A limit of this cgroup, by its names in version 2 and 1; "" without one."""
        for root in (self.sys / "fs/cgroup", self.sys / "fs/cgroup/unified"):
            for folder in self._cgroup_folders():
                if text := self.text(root / folder / name):
                    return text
        return self.text(self.sys / "fs/cgroup" / old_name)

    def _cgroup_folders(self) -> list[str]:
        own = [line[3:].lstrip("/") for line in self.text(self.proc / "self/cgroup").splitlines() if line[:3] == "0::"]
        return [*own, ""]

    def processors(self) -> int:
        """Number of processors that this process may use."""
        return len(os.sched_getaffinity(0))

    def processor_features(self) -> frozenset[str]:
        """Flags of the first processor; empty if the kernel lists none."""
        found = re.search(r"^(?:flags|Features)\s*:(.*)$", self.text(self.proc / "cpuinfo"), re.MULTILINE)
        return frozenset(found[1].split()) if found else frozenset()


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
    """Input of the checks, read at one time."""

    host: Host
    io: StoreIO
    settings: Mapping[str, Setting]
    options: Options
    """The options of a start with these settings; unset options are those of the store's last start."""
    config_file: Path | None
    paths: StorePaths | None
    """None if no store is named; the folder may be missing."""
    reachable: bool
    """False if the store exists but this user may not read it."""
    words: Mapping[str, int] | None
    """Words of the control file, of a running or ended group."""
    other_version: str
    """Error about a control file of another version of mqproc, empty without one."""
    holder: LockHolder | None
    """Holder of the store's lock."""
    running: bool
    used: Mapping[str, Any]
    """Options of the running or last group, from settings.json."""
    inventory: Inventory | None
    """Names and sizes of the store's files; None without a store."""

    @property
    def supervisor_pid(self) -> int:
        """Pid of the supervisor; 0 if no group runs in this PID namespace."""
        words = self.words
        return words["supervisor_pid"] if self.running and words and control_words.has_valid_pids(words) else 0

    @property
    def supervisor(self) -> str:
        """Text about the pid of the running group's supervisor."""
        return f", supervisor {self.supervisor_pid}" if self.supervisor_pid else " in another PID namespace"

    @property
    def held(self) -> bool:
        """Whether the store is in use by any program, also another version of mqproc or RocketMQ."""
        return self.holder is not None and not self.holder.ended

    @property
    def place(self) -> Path:
        """The store's folder, or its nearest existing parent."""
        return existing_folder(self.paths.root if self.paths else Path.cwd())

    @property
    def named(self) -> str:
        """The store's folder, quoted for a shell."""
        return shell_quoted(self.paths.root) if self.paths else "DIR"

    @property
    def store_flag(self) -> str:
        """`--store DIR` for suggested commands."""
        return f"--store {self.named}"

    def is_set(self, name: str) -> bool:
        """Whether an option is set explicitly."""
        return self.settings[name].is_explicit

    def set_options(self, **values: object) -> str:
        """How to set options: in the config file if there is one, else by flags."""
        file = self.config_file
        if file is not None and file.suffix == ".toml":
            lines = ", ".join(f"{name} = {encode_json(value)}" for name, value in values.items())
            return f"write {lines} into {file}{self._apply_step(values)}"
        flags = " ".join(f"--set {name}={value}" for name, value in values.items())
        start = f"mqproc up {self.store_flag} {flags}"
        return f"{self.stop_first}{start}"

    def _apply_step(self, names: Iterable[str]) -> str:
        """The step that makes a running group use a changed file."""
        if not self.running:
            return ""
        return f", then {self.how_to_apply(names)}"

    def how_to_apply(self, names: Iterable[str]) -> str:
        """How a running group gets changed options: by SIGHUP if possible, else by a restart."""
        reloads = all(FIELDS[name].metadata["reload"] for name in names)
        may_reload = reloads and self.supervisor_pid and not self._at_terminal
        return f"kill -HUP {self.supervisor_pid}" if may_reload else self.restart

    @property
    def _at_terminal(self) -> bool:
        """Whether the group runs at a terminal, where SIGHUP stops it."""
        try:
            stdin = os.readlink(f"/proc/{self.supervisor_pid}/fd/0")
        except OSError:
            # Unknown, as for another user's group: a restart works always.
            return True
        return stdin.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))

    @property
    def stop(self) -> str:
        return f"mqproc down {self.store_flag}"

    @property
    def stop_first(self) -> str:
        """Prefix for a command that needs a stopped store."""
        return f"{self.stop}; " if self.running else ""

    @property
    def restart(self) -> str:
        return f"{self.stop}; mqproc up {self.store_flag}"


def read_context(invocation: Invocation, host: Host | None = None) -> DoctorContext:
    """Read the context of a command line. Raises ConfigurationError, StoreAccessError."""
    io = StoreIO()
    root, _ = invocation.find_store()
    if root is not None:
        check_no_file(root)
    paths = StorePaths(root) if root is not None else None
    settings = invocation.settings()
    options_from(settings)
    used = _used_options(io, paths)
    given = settings if not used else {name: each for name, each in settings.items() if each.is_explicit}
    explicit = {name: setting.value for name, setting in given.items() if setting.source != "default"}
    options = Options(**{**used, **explicit})
    reachable = paths is None or _is_readable(paths)
    words, other_version = _read_words(paths)
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
        running=holder is not None and _is_alive(paths, words),
        used=used,
        inventory=_inventory(io, paths, options, holder) if reachable else None,
    )


def _is_alive(paths: StorePaths | None, words: Mapping[str, int] | None) -> bool:
    return bool(paths and words and control_words.supervisor_alive(paths, words, time.monotonic_ns()))


def _is_readable(paths: StorePaths) -> bool:
    """Whether this user may list the store's folders; true for a missing store."""
    if not os.path.isdir(paths.root):
        # A folder below an unreadable one counts as missing.
        return True
    folders = (paths.root, paths.own) if os.access(paths.root, os.X_OK) else (paths.root,)
    return all(os.access(folder, os.R_OK | os.X_OK) for folder in folders if os.path.isdir(folder))


def _read_words(paths: StorePaths | None) -> tuple[Mapping[str, int] | None, str]:
    if paths is None:
        return None, ""
    try:
        return control_words.read_words(paths), ""
    except OtherVersionError as error:
        return None, str(error)
    except (NotRunningError, CorruptStoreError, OSError):
        return None, ""


def _used_options(io: StoreIO, paths: StorePaths | None) -> dict[str, Any]:
    """Options in settings.json, empty if it cannot be read, which the check of files reports."""
    if paths is None:
        return {}
    try:
        return read_values(io, paths)
    except (OSError, ValueError, ConfigurationError):
        return {}


def _inventory(io: StoreIO, paths: StorePaths | None, options: Options, holder: LockHolder | None) -> Inventory | None:
    if paths is None or not os.path.isdir(paths.root):
        return None
    from mqproc.store.verify.inventory import take_inventory
    from mqproc.store.verify.verifier import sizes_of

    was_killed = holder is None and io.exists(paths.abort)
    return take_inventory(io, paths, sizes_of(io, paths, options), was_killed=was_killed)


# Findings


class Level(enum.StrEnum):
    """Severity: an error breaks the store, a warning is a future problem, a note informs."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


ORDER = (Level.ERROR, Level.WARNING, Level.NOTE, Level.OK)
"""The most severe first."""


_INSIDE = ("store", "group")
"""Areas of checks that read the store."""


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """Result of a check. `fix` is a command or an option, ready to use."""

    level: Level
    found: str
    why: str = ""
    fix: str = ""
    check: str = ""
    area: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "area": self.area,
            "level": str(self.level),
            "found": self.found,
            "why": self.why,
            "mend": self.fix,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """One question. `inspect` returns None if the question does not apply, as without a store."""

    name: str
    area: str
    question: str
    inspect: Callable[[DoctorContext], DoctorFinding | None]

    def run(self, context: DoctorContext) -> DoctorFinding | None:
        if self.area in _INSIDE and not context.reachable:
            return None  # The check `owner` reports it.
        try:
            result = self.inspect(context)
        except OSError as problem:
            result = error(
                f"the check failed: {problem}",
                "the state is unknown, and a group may get the same error",
                "look into dmesg for disk errors, and at the file with ls -l and df -h",
            )
        return None if result is None else replace(result, check=self.name, area=self.area)


def ok(found: str) -> DoctorFinding:
    """No problem."""
    return DoctorFinding(Level.OK, found)


def note(found: str, why: str, fix: str) -> DoctorFinding:
    """Information."""
    return DoctorFinding(Level.NOTE, found, why, fix)


def warning(found: str, why: str, fix: str) -> DoctorFinding:
    """A future problem."""
    return DoctorFinding(Level.WARNING, found, why, fix)


def error(found: str, why: str, fix: str) -> DoctorFinding:
    """A problem."""
    return DoctorFinding(Level.ERROR, found, why, fix)
