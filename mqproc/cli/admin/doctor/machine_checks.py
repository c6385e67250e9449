"""Checks of limits, kernel settings, memory, processor, clock, disk and file permissions."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final

import posix_ipc

from mqproc.cli.admin.doctor.context import Check, DoctorContext, DoctorFinding, error, note, ok, warning
from mqproc.io.store_io import FailedSyncError
from mqproc.ipc.bell import unlink_semaphore
from mqproc.ipc.health import compiling
from mqproc.layout import control as layout
from mqproc.paths import shell_quoted
from mqproc.util.units import GIB, MIB, counted, format_bytes, format_duration

OWN_DESCRIPTORS: Final = 256
"""Upper bound of a role's descriptors besides its clients: files, maps, bells."""
PROCESSES: Final = len(layout.ROLES) + 24
"""Processes of a group, with those that a start forks to scan the log."""
MAPS: Final = 4096
SEMAPHORE_BYTES: Final = 4096 * len(layout.ROLES)
GROUP_MEMORY_BYTES: Final = 256 * MIB
DIRTY_BYTES_MIN: Final = 64 * MIB
DIRTY_BACKGROUND_BYTES_MAX: Final = 4 * GIB
SWAPPED_BYTES_MAX: Final = 16 * MIB
AHEAD_MS_MAX: Final = 60_000
_SLOW_CRC: Final = "checksums of bodies take five times as long: 2 GB/s a role instead of 11"


def _open_files(context: DoctorContext) -> DoctorFinding | None:
    # The supervisor raises its soft limit to the hard one.
    limit = context.host.limit("Max open files", context.supervisor_pid)
    if limit is None:
        return None
    hard, needed = limit[1], context.options.max_connections + OWN_DESCRIPTORS
    if hard >= needed:
        return ok(f"{hard:,} may be open, {needed:,} suffice")
    return error(
        f"{hard:,} files may be open; {context.options.max_connections:,} clients (max_connections) need {needed:,}",
        "further clients wait without an answer, and a role that cannot open a segment stops working",
        f"ulimit -Hn {max(needed, 65_536)} in the shell (as root), LimitNOFILE={max(needed, 65_536)} in the unit",
    )


def _file_size(context: DoctorContext) -> DoctorFinding | None:
    limit = context.host.limit("Max file size", context.supervisor_pid)
    if limit is None:
        return None
    needed = max(context.options.mapped_file_size_commit_log, context.options.max_index_num * 20)
    if limit[0] >= needed:
        return ok("files may be as large as segments")
    return error(
        f"no file may be larger than {format_bytes(limit[0])}; segments and index files need {format_bytes(needed)}",
        "the commitlog-flusher is killed by SIGXFSZ when it creates a segment",
        "ulimit -f unlimited in the shell, LimitFSIZE=infinity in the unit",
    )


def _process_count(context: DoctorContext) -> DoctorFinding | None:
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


def _map_count(context: DoctorContext) -> DoctorFinding | None:
    most = context.host.setting("vm/max_map_count")
    if most is None:
        return None
    if most >= MAPS:
        return ok(f"a process may have {most:,} maps")
    return warning(
        f"vm.max_map_count = {most:,}",
        "roles map windows of segments, ConsumeQueues and index files; one map too many fails with ENOMEM",
        "sysctl -w vm.max_map_count=65530, and the same line in /etc/sysctl.d/mqproc.conf",
    )


def _semaphores(context: DoctorContext) -> DoctorFinding | None:
    name = f"/mqproc-doctor-{os.getpid()}"
    try:
        posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600).close()
    except (OSError, posix_ipc.Error) as problem:
        return error(
            f"no semaphore can be created: {problem}",
            "each role waits at a semaphore, a file in /dev/shm",
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm; --shm-size in a container",
        )
    unlink_semaphore(name)
    found = os.statvfs("/dev/shm")
    free = found.f_bavail * found.f_frsize
    if free < SEMAPHORE_BYTES:
        return error(
            f"/dev/shm has {format_bytes(free)} free, a group's semaphores take {format_bytes(SEMAPHORE_BYTES)}",
            "a start fails if there is no room for them",
            "mount -o remount,size=64m /dev/shm; --shm-size 64m in a container",
        )
    return ok(f"/dev/shm has {format_bytes(free)} free")


def _overcommit(context: DoctorContext) -> DoctorFinding | None:
    mode = context.host.setting("vm/overcommit_memory")
    if mode is None:
        return None
    if mode != 2:
        return ok(f"vm.overcommit_memory = {mode}")
    return warning(
        "vm.overcommit_memory = 2: allocations count in full",
        "roles are forks that share nearly all of their memory; counted in full, a fork fails with ENOMEM",
        "sysctl -w vm.overcommit_memory=0, and the same line in /etc/sysctl.d/mqproc.conf",
    )


def _dirty_pages(context: DoctorContext) -> DoctorFinding | None:
    total = context.host.memory().get("MemAvailable", 0)
    most = _dirty_bytes(context, "dirty", total)
    background = _dirty_bytes(context, "dirty_background", total)
    if most is None or background is None:
        return None
    shown = f"writing back begins at {format_bytes(background)} of dirty pages, writers wait from {format_bytes(most)}"
    if most < DIRTY_BYTES_MIN:
        return warning(
            shown,
            "every send writes to the page cache; with so little room sends wait for the disk",
            "sysctl -w vm.dirty_background_ratio=10 vm.dirty_ratio=20, and the same in /etc/sysctl.d/mqproc.conf",
        )
    if background > DIRTY_BACKGROUND_BYTES_MAX:
        return note(
            shown,
            "dirty pages of other programs are written in one burst, for which mqproc's syncs must wait",
            f"sysctl -w vm.dirty_background_bytes={GIB} vm.dirty_bytes={4 * GIB}",
        )
    return ok(shown)


def _dirty_bytes(context: DoctorContext, name: str, memory: int) -> int | None:
    """A kernel limit in bytes, which is set in bytes or as a share of the available memory."""
    in_bytes = context.host.setting(f"vm/{name}_bytes")
    if in_bytes:
        return in_bytes
    ratio = context.host.setting(f"vm/{name}_ratio")
    return None if ratio is None else memory * ratio // 100


def _huge_pages(context: DoctorContext) -> DoctorFinding | None:
    text = context.host.text(context.host.sys / "kernel/mm/transparent_hugepage/enabled")
    if not text:
        return None
    if "[always]" not in text:
        return ok(f"transparent huge pages: {text}")
    return note(
        "transparent huge pages: always",
        "a role that writes one byte of shared memory gets a private copy of 2 MiB instead of 4 KiB",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _swap(context: DoctorContext) -> DoctorFinding | None:
    swapped = 0
    if context.supervisor_pid and context.words is not None:
        pids = [context.supervisor_pid, *(context.words[f"{role}.pid"] for role in layout.ROLES)]
        swapped = sum(context.host.swapped_bytes(pid) for pid in pids if pid)
    if swapped > SWAPPED_BYTES_MAX:
        return warning(
            f"{format_bytes(swapped)} of the group are swapped out",
            "a role that waits for swap misses heartbeats, and is finally restarted as hung",
            "give the machine memory, or MemorySwapMax=0 in the unit; mqproc restart ROLE brings one back",
        )
    swappiness = context.host.setting("vm/swappiness") or 0
    if context.host.memory().get("SwapTotal", 0) and swappiness > 10:
        return note(
            f"there is swap, and vm.swappiness = {swappiness}",
            "the page cache of a busy log displaces idle roles; their next answer takes milliseconds longer",
            "sysctl -w vm.swappiness=1, and the same line in /etc/sysctl.d/mqproc.conf",
        )
    return ok("nothing of the group is swapped out" if context.running else "swapping is unlikely")


def _memory(context: DoctorContext) -> DoctorFinding | None:
    available = context.host.memory().get("MemAvailable", 0)
    text = context.host.cgroup("memory.max", "memory/memory.limit_in_bytes")
    allowed = int(text) if text.isdigit() else 1 << 62
    if not available:
        return None
    least = min(available if not context.running else allowed, allowed)
    if least < GROUP_MEMORY_BYTES:
        return warning(
            f"{format_bytes(least)} of memory for a group that takes up to {format_bytes(GROUP_MEMORY_BYTES)}",
            "the kernel kills roles when memory is short: SIGKILL without an entry in mqproc errors",
            f"MemoryMax={GROUP_MEMORY_BYTES * 4 // MIB}M in the unit, --memory 1g in a container, or a larger machine",
        )
    return ok(f"{format_bytes(available)} of memory available")


def _processor(context: DoctorContext) -> DoctorFinding | None:
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
            "the processor has no carry-less multiplication, or hides it", _SLOW_CRC,
            "in a virtual machine use the host's processor type (-cpu host)",
        )  # fmt: skip
    return ok(f"{context.host.processors()} processors, {'with' if features else 'unknown'} carry-less multiplication")


def _processor_share(context: DoctorContext) -> DoctorFinding | None:
    quota, _, period = context.host.cgroup("cpu.max", "cpu/cpu.cfs_quota_us").partition(" ")
    if not quota.isdigit():
        return ok(f"no limit below the {context.host.processors()} processors")
    share = int(quota) / int(period or 100_000)
    if share >= 1:
        return ok(f"{share:.1f} processors are allowed")
    return warning(
        f"{share:.2f} processors are allowed for {len(layout.ROLES) + 1} processes",
        "roles are paused during their work for up to a tenth of a second",
        "CPUQuota=200% in the unit, --cpus 2 in a container",
    )


def _python(context: DoctorContext) -> DoctorFinding | None:
    build = context.host.python
    fix = "a Python of the distribution, or one built with: ./configure --enable-optimizations --with-lto"
    if build.is_debug:
        return warning(f"Python {build.version} is a debug build", "it is several times slower", fix)
    if not build.is_optimized:
        return note(
            f"Python {build.version} at {build.prefix} was built without profile-guided optimization",
            "it is up to a third slower: large frames a tenth, single synced messages a third",
            f"{fix} (pyenv: PYTHON_CONFIGURE_OPTS)",
        )
    return ok(f"Python {build.version}, built with profile-guided optimization")


def _compiled_kernels(context: DoctorContext) -> DoctorFinding | None:
    from mqproc.kernels.jit import cache
    from mqproc.kernels.jit.compile import COMPILED

    if not COMPILED:
        return None
    if folder := cache.full_folder():
        return ok(f"compiled kernels are in {folder}")
    if folder := cache.writable_folder():
        words = context.words if context.running else None
        left = f": {compiling(words)}" if words and words["kernels_left"] else ""
        return ok(f"compiled kernels are cached in {folder}{left}")
    if context.paths is not None and context.paths.kernels.exists():
        return ok(f"compiled kernels are in the store's folder {context.paths.kernels}")
    return warning(
        f"compiled kernels cannot be cached: {'; '.join(cache.problems())}",
        "a group compiles its kernels into its store, at the first start of each store, which takes 10 to 20 s",
        "NUMBA_CACHE_DIR=/var/cache/mqproc in the environment, a folder of the user that runs the group",
    )


def _clock_synchronized(context: DoctorContext) -> DoctorFinding | None:
    synchronized = context.host.clock_synchronized
    if synchronized is None:
        return None
    if synchronized:
        return ok("the clock is synchronized")
    return warning(
        "nothing keeps the clock right (adjtimex: unsynchronized)",
        "store times decide on expiry, delayed delivery and queries by time",
        "timedatectl set-ntp true, or install chrony",
    )


def _clock_steps(context: DoctorContext) -> DoctorFinding | None:
    words = context.words
    if words is None:
        return None
    ahead_ms = words["written_store_timestamp_ms"] - round(time.time() * 1000)
    if ahead_ms > AHEAD_MS_MAX:
        return warning(
            f"the newest message was stored {format_duration(ahead_ms / 1000)} from now: the clock has been set back",
            "new messages get that time until the clock has reached it, and expire later by the difference",
            "timedatectl status: is the time right? chronyc makestep, or date -s, while no group runs",
        )
    if steps := words["writer_clock_steps"]:
        return warning(
            f"the clock has been seen to go back {steps:,} times since the group started",
            "a service steps the clock instead of slewing it; store times are clamped for 60 s, then follow",
            "chronyc tracking or timedatectl timesync-status: one service only, and makestep at boot only",
        )
    return ok("the clock has not gone back")


MACHINE_CHECKS: Final = (
    Check("nofile", "limits", "enough files may be open", _open_files),
    Check("fsize", "limits", "files may be large enough", _file_size),
    Check("nproc", "limits", "enough processes are allowed", _process_count),
    Check("max-map-count", "limits", "enough maps are allowed", _map_count),
    Check("semaphores", "limits", "semaphores can be created in /dev/shm", _semaphores),
    Check("overcommit", "kernel", "forks are not counted in full", _overcommit),
    Check("dirty-pages", "kernel", "dirty pages: neither too few nor too many", _dirty_pages),
    Check("huge-pages", "kernel", "huge pages do not multiply memory", _huge_pages),
    Check("swap", "kernel", "roles are not swapped out", _swap),
    Check("memory", "kernel", "a group fits into memory", _memory),
    Check("processor", "processor", "kernels are compiled and use the processor's instructions", _processor),
    Check("processor-share", "processor", "roles are not throttled", _processor_share),
    Check("python", "processor", "Python is an optimized build", _python),
    Check("compiled-kernels", "processor", "compiled kernels are cached", _compiled_kernels),
    Check("clock-synchronized", "clock", "the clock is synchronized", _clock_synchronized),
    Check("clock-steps", "clock", "the clock does not go back", _clock_steps),
)


# Disk and access


INODES_MIN: Final = 1000
SYNCS: Final = 12
SYNC_BYTES: Final = 4096
SYNC_MS_MAX: Final = 200
SYNC_FLUSH_MS_MAX: Final = 20
NAMES_MAX: Final = 20_000
"""Limit of files whose owner is checked."""

_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_REMOTE: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "glusterfs", "ceph", "fuse.glusterfs"})
_COPYING: Final = frozenset({"btrfs", "zfs", "bcachefs"})
_UNSAFE: Final = frozenset({"nobarrier", "barrier=0", "data=writeback", "nointegrity"})
_AFTER_AN_ERROR: Final = "emergency_ro"
_READ_ONLY: Final = frozenset({"ro", _AFTER_AN_ERROR})
_SLOW: Final = frozenset({"sync", "dirsync", "strictatime"})


def _space(context: DoctorContext) -> DoctorFinding | None:
    used, free = context.io.disk_usage(context.place)
    total, options = used + free, context.options
    share = 100 * used / total if total else 0.0
    shown = f"{format_bytes(free)} free of {format_bytes(total)}, {share:.0f} % used"
    if share > options.disk_space_warning_level_ratio:
        return error(
            f"{shown}; sends are refused above {options.disk_space_warning_level_ratio} %",
            "sends fail with DISK_FULL; dispatch waits too when no space is left",
            f"mqproc store retention --execute {context.store_flag}, or free space, or "
            + context.set_options(disk_space_warning_level_ratio=min(99, int(share) + 2)),
        )
    if refusal := options.disk_refusal(used, free):
        return error(
            f"{shown}; sends are refused: {refusal}",
            "sends fail with DISK_FULL",
            "free space, or a new store with --profile embedded, or " + context.set_options(disk_floor_bytes=0),
        )
    if share > options.disk_max_used_space_ratio:
        return warning(
            f"{shown}; above {options.disk_max_used_space_ratio} % expired segments are deleted at any hour, above "
            f"{options.disk_space_clean_forcibly_ratio} % the oldest of any age",
            "messages may be deleted before their time",
            f"mqproc store retention {context.store_flag} shows the files to be deleted; free space, or "
            "keep messages for a shorter time: "
            + context.set_options(file_reserved_time=max(1, options.file_reserved_time // 2)),
        )
    return ok(shown)


def _inodes(context: DoctorContext) -> DoctorFinding | None:
    found = os.statvfs(context.place)
    if not found.f_files:
        return None
    if found.f_favail >= INODES_MIN:
        return ok(f"{found.f_favail:,} more files may be created")
    return error(
        f"{found.f_favail:,} more files may be created on this file system",
        "each queue has a folder and a file: a new topic fails as on a full disk",
        "remove small files elsewhere on it, or create the file system with more inodes (mkfs.ext4 -N)",
    )


def _file_system(context: DoctorContext) -> DoctorFinding | None:
    mount = context.host.mount_of(context.place)
    if mount is None:
        return None
    shown = f"{mount.kind} on {mount.source} at {mount.point}"
    move = "move the store to a local ext4 or xfs file system: cp -a, with no group running"
    if mount.kind in _MEMORY:
        return warning(shown, "this is memory: the store is lost at the next reboot", move)
    if mount.kind in _REMOTE:
        return error(
            shown, "shared mappings, locks and syncs are unreliable on a network file system: data can be lost", move
        )
    if mount.kind == "overlay":
        return warning(
            shown,
            "the container's own layer: it is deleted with the container, and syncs are slower",
            "use a volume: docker run -v mqproc-store:/store …",
        )
    if mount.kind in _COPYING:
        return note(
            shown,
            "copy-on-write allocates space for every write, also to mapped pages: a full disk or quota ends the group "
            "instead of refusing sends; acknowledged messages are not lost",
            f"chattr +C {shell_quoted(context.place)} on btrfs before the first file and no quota, or ext4 or xfs",
        )
    return ok(shown)


def _mount_options(context: DoctorContext) -> DoctorFinding | None:
    mount = context.host.mount_of(context.place)
    if mount is None:
        return None
    options, point = mount.options, shell_quoted(Path(mount.point))
    if read_only := options & _READ_ONLY:
        # Since Linux 6.12 a disk error sets emergency_ro instead of ro, which only a new mount clears.
        remount = "umount, fsck and mount" if _AFTER_AN_ERROR in read_only else "mount -o remount,rw"
        return error(
            f"{mount.point} is mounted read-only",
            "nothing can be stored; errors=remount-ro causes this after a disk error",
            f"dmesg | grep -i {shell_quoted(Path(Path(mount.source).name))}; then {remount} {point}",
        )
    if unsafe := sorted(options & _UNSAFE):
        return warning(
            f"{mount.point} is mounted with {','.join(unsafe)}",
            "after a power loss synced data may be missing",
            f"remove it from /etc/fstab and mount again: mount -o remount,barrier=1 {point}",
        )
    if slow := sorted(options & _SLOW):
        return warning(
            f"{mount.point} is mounted with {','.join(slow)}",
            "each write or read goes to the disk at once, although mqproc syncs where needed",
            f"mount -o remount,async,relatime {point}, and the same in /etc/fstab",
        )
    return ok(",".join(sorted(options & {"rw", "relatime", "noatime", "nodiratime", "lazytime", "discard"})))


def _sync_rate(context: DoctorContext) -> DoctorFinding | None:
    """Time a few syncs of one page each, in an unnamed file."""
    if not os.access(context.place, os.W_OK):
        return None
    try:
        took_ms = median(_syncs_ms(context))
    except FailedSyncError as problem:
        return error(
            f"a sync fails: {problem}",
            "a failed sync makes a store read-only, as the state of the disk is unknown",
            "look into dmesg for disk errors; repair or replace the disk before a group starts",
        )
    except OSError as problem:
        fix = "free space, quota or inodes: df -h; df -i; quota"
        if problem.errno == errno.EROFS:
            fix = "look into dmesg for the reason; repair the disk, check it (fsck), and mount it read-write"
        return error(
            f"{SYNCS * SYNC_BYTES // 1024} KiB cannot be written in {context.place}: {problem.strerror}",
            "sends are refused, and a group cannot create its files",
            fix,
        )
    shown = f"fdatasync of {SYNC_BYTES // 1024} KiB takes {took_ms:.2f} ms, median of {SYNCS}"
    if context.options.sync_flush and took_ms > SYNC_FLUSH_MS_MAX:
        return warning(
            shown,
            f"with SYNC_FLUSH every send waits for one: {1000 / took_ms:.0f} a second for a single sender",
            "a disk with a protected write cache, many sends under way at once, or "
            + context.set_options(flush_disk_type="ASYNC_FLUSH"),
        )
    if took_ms > SYNC_MS_MAX:
        return warning(
            shown,
            "messages become durable later, and a role in a sync can do nothing else",
            "iostat -x 1: is the disk busy with other work? Use a separate disk for the store",
        )
    return ok(shown)


def _syncs_ms(context: DoctorContext) -> Iterator[float]:
    io = context.io
    page = os.urandom(SYNC_BYTES)
    with tempfile.TemporaryFile(dir=context.place) as file:
        fd = file.fileno()
        for number in range(SYNCS):
            io.pwrite(fd, page, number * SYNC_BYTES)
            began = time.perf_counter()
            io.sync(fd)
            yield 1000 * (time.perf_counter() - began)


def _owner(context: DoctorContext) -> DoctorFinding | None:
    """The owner of the store's folder and its files."""
    if context.paths is None or not os.path.isdir(context.paths.root):
        return None
    root = context.paths.root
    uid = root.stat().st_uid
    if uid != os.geteuid() and os.geteuid() != 0:
        return error(
            f"{root} belongs to user {uid}, this is user {os.geteuid()}",
            "a group runs only as the store's owner, so that its sockets and files have one owner",
            f"sudo -u '#{uid}' mqproc up {context.store_flag}, or chown -R {os.geteuid()} {context.named}",
        )
    if not context.reachable:
        return error(
            f"user {os.geteuid()} may not read {root}", "the store cannot be checked", f"chmod -R u+rwX {context.named}"
        )
    others = [entry for entry in _entries(root) if entry.stat(follow_symlinks=False).st_uid != uid]
    if others:
        return error(
            f"{others[0].path} belongs to user {others[0].stat(follow_symlinks=False).st_uid}, the store to user {uid}"
            + (f"; {counted(len(others) - 1, 'more file')}" if others[1:] else ""),
            "a start refuses a store with files of another owner (exit code 3), as their origin is unknown",
            f"chown -R {uid} {context.named}",
        )
    return ok(f"everything belongs to user {uid}")


def _entries(root: Path) -> Iterator[os.DirEntry[str]]:
    folders, seen = [os.fspath(root)], 0
    while folders:
        with os.scandir(folders.pop()) as found:
            for entry in found:
                seen += 1
                if seen > NAMES_MAX:
                    return
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)


def _modes(context: DoctorContext) -> DoctorFinding | None:
    if context.paths is None or not context.reachable or not os.path.isdir(context.paths.root):
        return None
    root, own = context.paths.root, context.paths.own
    if root.stat().st_mode & stat.S_IWOTH:
        return error(
            f"all users may write to {root} (mode {stat.S_IMODE(root.stat().st_mode):04o})",
            "a start refuses it: any user could replace files of the store",
            f"chmod o-w {context.named}",
        )
    if own.is_dir() and stat.S_IMODE(own.stat().st_mode) & 0o066:
        return warning(
            f"{own} has mode {stat.S_IMODE(own.stat().st_mode):04o}",
            "its sockets are for the owner only",
            f"chmod 700 {shell_quoted(own)}",
        )
    if root.is_dir() and not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        return error(f"{root} may not be written", "a start fails", f"chmod u+rwx {context.named}")
    return ok(f"{root} is closed to others")


DISK_CHECKS: Final = (
    Check("space", "disk", "there is enough space", _space),
    Check("inodes", "disk", "more files can be created", _inodes),
    Check("file-system", "disk", "the file system is safe for a store", _file_system),
    Check("mount-options", "disk", "the mount options make syncs durable", _mount_options),
    Check("sync-rate", "disk", "syncs are fast enough", _sync_rate),
    Check("owner", "access", "the store and its files have one owner", _owner),
    Check("modes", "access", "other users may not write to the store", _modes),
)
