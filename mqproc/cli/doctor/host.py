"""What the kernel says of this machine (/proc, /sys, its clock), and how Python was built. Nothing is changed."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

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
