"""A machine on which nothing is wrong, as files that its kernel would show; tests harm one of them."""

from __future__ import annotations

from pathlib import Path

from mqproc.cli.admin.doctor.context import Host, PythonBuild

_LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max file size             unlimited            unlimited            bytes
Max processes             30000                30000                processes
Max open files            1024                 524288               files
Max locked memory         8388608              8388608              bytes
"""
_FILES = {
    "proc/self/limits": _LIMITS,
    "proc/self/mountinfo": "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro\n",
    "proc/self/cgroup": "0::/\n",
    "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\nSwapTotal: 0 kB\n",
    "proc/cpuinfo": "processor : 0\nflags\t\t: fpu sse2 pclmulqdq\n",
    "proc/sys/vm/max_map_count": "65530\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "proc/sys/vm/swappiness": "60\n",
    "proc/sys/vm/dirty_ratio": "20\n",
    "proc/sys/vm/dirty_background_ratio": "10\n",
    "proc/sys/vm/dirty_bytes": "0\n",
    "proc/sys/vm/dirty_background_bytes": "0\n",
    "proc/sys/net/core/wmem_max": "4194304\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}


PYTHONS = {
    "fast": PythonBuild("3.13.1", "/opt/python", "'--enable-optimizations' '--with-lto'"),
    "distribution": PythonBuild("3.11.2", "/usr", "'--enable-shared'"),
    "slow": PythonBuild("3.12.4", "/home/me/.pyenv/versions/3.12.4", "'--enable-shared'"),
    "debug": PythonBuild("3.13.1", "/opt/python", "'--enable-optimizations' '--with-pydebug'", is_debug=True),
}


def make_host(root: Path, *, clock_synchronized: bool = True, python: str = "fast", **changes: str) -> Host:
    """A healthy machine below `root`; `changes` are texts of files by the last parts of their names."""
    known = {name.rpartition("/")[2]: name for name in _FILES} | {"cpu_max": "sys/fs/cgroup/cpu.max"}
    for name, text in {**_FILES, **{known[key]: text for key, text in changes.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root / "proc", root / "sys", clock_synchronized, PYTHONS[python])


def limits(name: str, value: int) -> str:
    """/proc/PID/limits with one of them lowered."""
    lines = [line for line in _LIMITS.splitlines() if not line.startswith(name)]
    return "\n".join([*lines, f"{name:<25} {value:<20} {value:<20} units"])
