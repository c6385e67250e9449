"""Checks of the machine: limits of processes, kernel settings, memory, processor, clock."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import posix_ipc

from mqproc.cli.admin.doctor.context import Check, DoctorContext, Said, error, note, ok, warning
from mqproc.cli.output import format_bytes
from mqproc.cli.times import format_duration
from mqproc.ipc.bell import semaphore_name, unlink_semaphore
from mqproc.layout import control as layout
from mqproc.util.units import GIB, MIB

OWN_DESCRIPTORS: Final = 256
"""What a role has open besides its clients, at most: files, maps, bells."""
PROCESSES: Final = len(layout.ROLES) + 24
"""The group, with what a start forks to scan ahead."""
MAPS: Final = 4096
SEMAPHORE_BYTES: Final = 4096 * len(layout.ROLES)
GROUP_MEMORY_BYTES: Final = 256 * MIB
DIRTY_BYTES_MIN: Final = 64 * MIB
DIRTY_BACKGROUND_BYTES_MAX: Final = 4 * GIB
SWAPPED_BYTES_MAX: Final = 16 * MIB
SOCKET_BUFFER_BYTES: Final = MIB
AHEAD_MS_MAX: Final = 60_000
_SLOW_CRC: Final = "checksums of bodies take five times as long: 2 GB/s a role instead of 11"


def _open_files(context: DoctorContext) -> Said | None:
    # The supervisor raises its soft limit to the hard one.
    limit = context.host.limit("Max open files", context.supervisor_pid)
    if limit is None:
        return None
    hard, needed = limit[1], context.options.max_connections + OWN_DESCRIPTORS
    if hard >= needed:
        return ok(f"{hard:,} may be open, {needed:,} suffice")
    return error(
        f"{hard:,} files may be open; {context.options.max_connections:,} clients (max_connections) need {needed:,}",
        "clients beyond that wait unheard, and a role that finds no descriptor for a segment stops working",
        f"ulimit -Hn {max(needed, 65_536)} in the shell (as root), LimitNOFILE={max(needed, 65_536)} in the unit",
    )


def _file_size(context: DoctorContext) -> Said | None:
    limit = context.host.limit("Max file size", context.supervisor_pid)
    if limit is None:
        return None
    needed = max(context.options.mapped_file_size_commit_log, context.options.max_index_num * 20)
    if limit[0] >= needed:
        return ok("files may become as large as segments are")
    return error(
        f"no file may be larger than {format_bytes(limit[0])}; segments and index files need {format_bytes(needed)}",
        "the commitlog-flusher is killed by SIGXFSZ when it makes a segment",
        "ulimit -f unlimited in the shell, LimitFSIZE=infinity in the unit",
    )


def _locked_memory(context: DoctorContext) -> Said | None:
    limit = context.host.limit("Max locked memory", context.supervisor_pid)
    return None if limit is None else ok(f"{format_bytes(limit[0])} may be locked; mqproc locks none")


def _process_count(context: DoctorContext) -> Said | None:
    limit = context.host.limit("Max processes", context.supervisor_pid)
    in_container = context.host.cgroup("pids.max", "pids/pids.max")
    most = min(limit[0] if limit else 1 << 62, int(in_container) if in_container.isdigit() else 1 << 62)
    if most >= PROCESSES:
        return ok(f"a group has {len(layout.ROLES) + 2} processes; more than {PROCESSES} are allowed")
    return error(
        f"{most:,} processes are allowed; a start takes up to {PROCESSES}",
        "a role that cannot be forked is not started, and the group halts",
        f"ulimit -u {4 * PROCESSES} in the shell, TasksMax={4 * PROCESSES} in the unit, --pids-limit in a container",
    )


def _map_count(context: DoctorContext) -> Said | None:
    most = context.host.setting("vm/max_map_count")
    if most is None:
        return None
    if most >= MAPS:
        return ok(f"a process may have {most:,} maps")
    return warning(
        f"vm.max_map_count = {most:,}",
        "roles map windows of segments, ConsumeQueues and index files; a map too many is ENOMEM",
        "sysctl -w vm.max_map_count=65530, and the same line in /etc/sysctl.d/mqproc.conf",
    )


def _semaphores(context: DoctorContext) -> Said | None:
    name = f"/mqproc-doctor-{os.getpid()}"
    try:
        posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600).close()
    except (OSError, posix_ipc.Error) as problem:
        return error(
            f"no semaphore can be made: {problem}",
            "each role waits at one; it is a file in /dev/shm",
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm; --shm-size in a container",
        )
    unlink_semaphore(name)
    found = os.statvfs("/dev/shm")
    free = found.f_bavail * found.f_frsize
    if free < SEMAPHORE_BYTES:
        return error(
            f"/dev/shm has {format_bytes(free)} free, a group's semaphores take {format_bytes(SEMAPHORE_BYTES)}",
            "a start fails when there is no room for them",
            "mount -o remount,size=64m /dev/shm; --shm-size 64m in a container",
        )
    return ok(f"/dev/shm has {format_bytes(free)} free")


def _left_semaphores(context: DoctorContext) -> Said | None:
    words = context.words
    if words is None or context.holder is not None:
        return None
    names = [semaphore_name(words["store_id"], words["epoch"], number) for number in range(len(layout.ROLES))]
    left = [path for name in names if (path := Path(f"/dev/shm/sem.{name[1:]}")).exists()]
    if not left:
        return ok("no semaphore was left behind")
    return note(
        f"{len(left)} semaphores of a group that was killed while it started, {left[0]} first",
        "they only take space; the next start removes them",
        "rm " + " ".join(map(str, left)),
    )


def _overcommit(context: DoctorContext) -> Said | None:
    mode = context.host.setting("vm/overcommit_memory")
    if mode is None:
        return None
    if mode != 2:
        return ok(f"vm.overcommit_memory = {mode}")
    return warning(
        "vm.overcommit_memory = 2: memory must be there when it is asked for",
        "roles are forks that share nearly all of their memory; counted in full, a fork fails with ENOMEM",
        "sysctl -w vm.overcommit_memory=0, and the same line in /etc/sysctl.d/mqproc.conf",
    )


def _dirty_pages(context: DoctorContext) -> Said | None:
    total = context.host.memory().get("MemAvailable", 0)
    most = _dirty_bytes(context, "dirty", total)
    background = _dirty_bytes(context, "dirty_background", total)
    if most is None or background is None:
        return None
    shown = f"writing back begins at {format_bytes(background)} of dirty pages, writers wait from {format_bytes(most)}"
    if most < DIRTY_BYTES_MIN:
        return warning(
            shown,
            "every send is a write to the page cache: with so little room sends wait for the disk",
            "sysctl -w vm.dirty_background_ratio=10 vm.dirty_ratio=20, and the same in /etc/sysctl.d/mqproc.conf",
        )
    if background > DIRTY_BACKGROUND_BYTES_MAX:
        return note(
            shown,
            "what other programs leave dirty is written in one go, and mqproc's syncs wait behind it",
            f"sysctl -w vm.dirty_background_bytes={GIB} vm.dirty_bytes={4 * GIB}",
        )
    return ok(shown)


def _dirty_bytes(context: DoctorContext, name: str, memory: int) -> int | None:
    """The kernel's limit in bytes: set as bytes, or as a share of the available memory."""
    in_bytes = context.host.setting(f"vm/{name}_bytes")
    if in_bytes:
        return in_bytes
    ratio = context.host.setting(f"vm/{name}_ratio")
    return None if ratio is None else memory * ratio // 100


def _huge_pages(context: DoctorContext) -> Said | None:
    text = context.host.text(context.host.sys / "kernel/mm/transparent_hugepage/enabled")
    if not text:
        return None
    if "[always]" not in text:
        return ok(f"transparent huge pages: {text}")
    return note(
        "transparent huge pages: always",
        "a role that writes one byte of what it shares with the template gets 2 MiB of its own instead of 4 KiB",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _swap(context: DoctorContext) -> Said | None:
    swapped = 0
    if context.running and context.words is not None:
        pids = [context.supervisor_pid, *(context.words[f"{role}.pid"] for role in layout.ROLES)]
        swapped = sum(context.host.swapped_bytes(pid) for pid in pids if pid)
    if swapped > SWAPPED_BYTES_MAX:
        return warning(
            f"{format_bytes(swapped)} of the group lie in swap",
            "a role that waits for its own memory beats late, and is taken for hung in the end",
            "give the machine memory, or MemorySwapMax=0 in the unit; mqproc restart ROLE brings one back",
        )
    swappiness = context.host.setting("vm/swappiness") or 0
    if context.host.memory().get("SwapTotal", 0) and swappiness > 10:
        return note(
            f"there is swap, and vm.swappiness = {swappiness}",
            "the page cache of a busy log pushes idle roles out; their first answer afterwards takes milliseconds",
            "sysctl -w vm.swappiness=1, and the same line in /etc/sysctl.d/mqproc.conf",
        )
    return ok("nothing of the group is swapped out" if context.running else "no swapping to be feared")


def _memory(context: DoctorContext) -> Said | None:
    available = context.host.memory().get("MemAvailable", 0)
    text = context.host.cgroup("memory.max", "memory/memory.limit_in_bytes")
    allowed = int(text) if text.isdigit() else 1 << 62
    if not available:
        return None
    least = min(available if not context.running else allowed, allowed)
    if least < GROUP_MEMORY_BYTES:
        return warning(
            f"{format_bytes(least)} of memory for a group that takes up to {format_bytes(GROUP_MEMORY_BYTES)}",
            "the kernel kills roles for lack of memory: SIGKILL without a word in mqproc errors",
            f"MemoryMax={GROUP_MEMORY_BYTES * 4 // MIB}M in the unit, --memory 1g in a container, or a larger machine",
        )
    return ok(f"{format_bytes(available)} of memory available")


def _processor(context: DoctorContext) -> Said | None:
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return error(
            f"NUMBA_DISABLE_JIT={os.environ['NUMBA_DISABLE_JIT']}: kernels run uncompiled",
            "a thousand times slower; meant for tests of the kernels only",
            "unset NUMBA_DISABLE_JIT",
        )
    features = context.host.processor_features()
    chosen = os.environ.get("NUMBA_CPU_FEATURES")
    if chosen is not None and "+pclmul" not in chosen.split(","):
        return note("NUMBA_CPU_FEATURES without +pclmul", _SLOW_CRC, "unset NUMBA_CPU_FEATURES")
    if features and not features & {"pclmulqdq", "pmull"}:
        return note(
            "the processor has no carry-less multiplication, or does not show it", _SLOW_CRC,
            "in a virtual machine: give it the host's processor (-cpu host)",
        )  # fmt: skip
    return ok(f"{context.host.processors()} processors, {'with' if features else 'unknown'} carry-less multiplication")


def _processor_share(context: DoctorContext) -> Said | None:
    quota, _, period = context.host.cgroup("cpu.max", "cpu/cpu.cfs_quota_us").partition(" ")
    if not quota.isdigit():
        return ok(f"no limit below the {context.host.processors()} processors")
    share = int(quota) / int(period or 100_000)
    if share >= 1:
        return ok(f"{share:.1f} processors are allowed")
    return warning(
        f"{share:.2f} processors are allowed for {len(layout.ROLES) + 1} processes",
        "roles are stopped in the middle of their work for up to a tenth of a second at a time",
        "CPUQuota=200% in the unit, --cpus 2 in a container",
    )


def _python(context: DoctorContext) -> Said | None:
    build = context.host.python
    mend = "a Python of the distribution, or one built with: ./configure --enable-optimizations --with-lto"
    if build.is_debug:
        return warning(f"Python {build.version} is a debug build", "each step of it takes several times as long", mend)
    if not build.is_optimized:
        return note(
            f"Python {build.version} at {build.prefix} was built without profile-guided optimization",
            "its steps take a third longer: large frames come a tenth slower, synced single ones a third",
            f"{mend} (pyenv: PYTHON_CONFIGURE_OPTS)",
        )
    return ok(f"Python {build.version}, built with profiles of its own runs")


def _compiled_kernels(context: DoctorContext) -> Said | None:
    import mqproc.kernels

    named = os.environ.get("NUMBA_CACHE_DIR")
    beside = Path(mqproc.kernels.__path__[0])
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~/.cache")))
    places = [Path(named)] if named else [beside, own]
    usable = [place for place in places if _can_be_written(place)]
    if usable:
        return ok(f"compiled kernels are kept at {usable[0]}")
    return warning(
        f"compiled kernels cannot be kept: {' and '.join(map(str, places))} may not be written",
        "each start compiles them anew, which takes a minute",
        "NUMBA_CACHE_DIR=/var/cache/mqproc in the environment, a folder of the user that runs the group",
    )


def _can_be_written(folder: Path) -> bool:
    """Whether a folder, or the nearest one above it that is there, takes files from this user."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def _clock_synchronized(context: DoctorContext) -> Said | None:
    synchronized = context.host.clock_synchronized
    if synchronized is None:
        return None
    if synchronized:
        return ok("the kernel says that the clock is kept right")
    return warning(
        "nothing keeps the clock right (adjtimex: unsynchronized)",
        "store times order nothing but decide what has expired, what is delivered when, and queries by time",
        "timedatectl set-ntp true, or install chrony",
    )


def _clock_steps(context: DoctorContext) -> Said | None:
    words = context.words
    if words is None:
        return None
    ahead_ms = words["written_store_timestamp_ms"] - round(time.time() * 1000)
    if ahead_ms > AHEAD_MS_MAX:
        return warning(
            f"the newest message was stored {format_duration(ahead_ms / 1000)} from now: the clock has been set back",
            "new messages get that time until the clock has reached it, and are as much younger for retention",
            "timedatectl status: is the time right? chronyc makestep, or date -s, while no group runs",
        )
    if steps := words["writer_clock_steps"]:
        return warning(
            f"the clock was seen to go back {steps:,} times since the group started",
            "something steps it instead of slewing it; store times are clamped for 60 s, then follow",
            "chronyc tracking or timedatectl timesync-status: one service only, and makestep at boot only",
        )
    return ok("the clock has not gone back")


def _socket_buffers(context: DoctorContext) -> Said | None:
    most = context.host.setting("net/core/wmem_max")
    if most is None:
        return None
    shown = f"net.core.wmem_max = {most:,}"
    mend = f"sysctl -w net.core.wmem_max={SOCKET_BUFFER_BYTES}, and the same line in /etc/sysctl.d/mqproc.conf"
    why = "frames and answers of more than that go in several turns between client and role"
    if most < 64 * 1024:
        return warning(f"{shown}; sockets ask for {SOCKET_BUFFER_BYTES:,} bytes", why, mend)
    if most < SOCKET_BUFFER_BYTES:
        return note(f"{shown}; sockets ask for {SOCKET_BUFFER_BYTES:,} bytes", why, mend)
    return ok(shown)


MACHINE_CHECKS: Final = (
    Check("nofile", "limits", "enough files may be open", _open_files),
    Check("fsize", "limits", "files may become large enough", _file_size),
    Check("memlock", "limits", "memory that may be locked", _locked_memory),
    Check("nproc", "limits", "enough processes are allowed", _process_count),
    Check("max-map-count", "limits", "enough maps are allowed", _map_count),
    Check("semaphores", "limits", "semaphores can be made in /dev/shm", _semaphores),
    Check("left-semaphores", "limits", "no semaphores were left behind", _left_semaphores),
    Check("overcommit", "kernel", "forks are not counted in full", _overcommit),
    Check("dirty-pages", "kernel", "dirty pages: neither too few nor too many", _dirty_pages),
    Check("huge-pages", "kernel", "huge pages do not multiply memory", _huge_pages),
    Check("swap", "kernel", "roles are not swapped out", _swap),
    Check("memory", "kernel", "a group fits into memory", _memory),
    Check("socket-buffers", "kernel", "frames fit into socket buffers", _socket_buffers),
    Check("processor", "processor", "kernels are compiled, with the instructions they want", _processor),
    Check("processor-share", "processor", "roles are not throttled", _processor_share),
    Check("python", "processor", "Python is a build for speed", _python),
    Check("compiled-kernels", "processor", "compiled kernels are kept", _compiled_kernels),
    Check("clock-synchronized", "clock", "something keeps the clock right", _clock_synchronized),
    Check("clock-steps", "clock", "the clock does not go back", _clock_steps),
)
