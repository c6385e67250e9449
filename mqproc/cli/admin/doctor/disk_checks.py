"""Checks of the disk and of who may do what in the store's folder."""

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

from mqproc.cli.admin.doctor.context import Check, DoctorContext, Said, error, note, ok, warning
from mqproc.cli.output import format_bytes
from mqproc.io.store_io import FailedSyncError
from mqproc.paths import in_shell
from mqproc.util.units import counted

INODES_MIN: Final = 1000
SYNCS: Final = 12
SYNC_BYTES: Final = 4096
SYNC_MS_MAX: Final = 200
SYNC_FLUSH_MS_MAX: Final = 20
NAMES_MAX: Final = 20_000
"""More names than this are not looked at for their owners."""

_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_REMOTE: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "glusterfs", "ceph", "fuse.glusterfs"})
_COPYING: Final = frozenset({"btrfs", "zfs", "bcachefs"})
_UNSAFE: Final = frozenset({"nobarrier", "barrier=0", "data=writeback", "nointegrity"})
_AFTER_AN_ERROR: Final = "emergency_ro"
_READ_ONLY: Final = frozenset({"ro", _AFTER_AN_ERROR})
_SLOW: Final = frozenset({"sync", "dirsync", "strictatime"})


def _space(context: DoctorContext) -> Said | None:
    used, free = context.io.disk_usage(context.place)
    total, options = used + free, context.options
    share = 100 * used / total if total else 0.0
    shown = f"{format_bytes(free)} free of {format_bytes(total)}, {share:.0f} % used"
    if share > options.disk_space_warning_level_ratio:
        return error(
            f"{shown}; sends are refused above {options.disk_space_warning_level_ratio} %",
            "DISK_FULL is what senders are told; dispatch waits too when nothing is left",
            f"mqproc store retention --execute {context.store_flag}, or make room, or "
            + context.set_options(disk_space_warning_level_ratio=min(99, int(share) + 2)),
        )
    if share > options.disk_max_used_space_ratio:
        return warning(
            f"{shown}; above {options.disk_max_used_space_ratio} % expired segments go at any hour, above "
            f"{options.disk_space_clean_forcibly_ratio} % the oldest of any age",
            "messages may be deleted before their time",
            f"mqproc store retention {context.store_flag} shows what would go; make room, or keep messages less long: "
            + context.set_options(file_reserved_time=max(1, options.file_reserved_time // 2)),
        )
    need = 2 * options.mapped_file_size_commit_log + options.max_index_num * 20
    if free < need and not (context.inventory and context.inventory.segments):
        return error(
            f"{shown}; the first two segments and an index file take {format_bytes(need)}",
            "a group on this store cannot make its first files",
            "make room, or smaller files: "
            + context.set_options(
                mapped_file_size_commit_log=64 << 20, max_index_num=400_000, max_hash_slot_num=100_000
            ),
        )
    return ok(shown)


def _inodes(context: DoctorContext) -> Said | None:
    found = os.statvfs(context.place)
    if not found.f_files:
        return None
    if found.f_favail >= INODES_MIN:
        return ok(f"{found.f_favail:,} more files may be made")
    return error(
        f"{found.f_favail:,} more files may be made on this file system",
        "each queue has a folder and a file: a new topic fails as on a full disk",
        "remove small files elsewhere on it, or make it anew with more inodes (mkfs.ext4 -N)",
    )


def _file_system(context: DoctorContext) -> Said | None:
    mount = context.host.mount_of(context.place)
    if mount is None:
        return None
    shown = f"{mount.kind} on {mount.source} at {mount.point}"
    move = "move the store to a local ext4 or xfs file system: cp -a, with no group running"
    if mount.kind in _MEMORY:
        return warning(shown, "this is memory: nothing of the store outlives the machine's next start", move)
    if mount.kind in _REMOTE:
        return error(
            shown, "a shared map, a lock or a sync means less on another machine's disk: data can be lost", move
        )
    if mount.kind == "overlay":
        return warning(
            shown,
            "a container's own layer: it goes with the container, and syncs cost more",
            "a volume: docker run -v mqproc-store:/store …",
        )
    if mount.kind in _COPYING:
        return note(
            shown,
            "each write takes new room, of a mapped page too: a full disk, or a used up quota, ends the group, where "
            "elsewhere sends are refused; nothing that was acknowledged is lost",
            f"chattr +C {in_shell(context.place)} on btrfs before the first file and no quota, or ext4 or xfs",
        )
    return ok(shown)


def _mount_options(context: DoctorContext) -> Said | None:
    mount = context.host.mount_of(context.place)
    if mount is None:
        return None
    options, point = mount.options, in_shell(Path(mount.point))
    if read_only := options & _READ_ONLY:
        # After an error of the disk that is not the option `ro` since Linux 6.12, and goes only with the mount.
        again = "umount, fsck and mount" if _AFTER_AN_ERROR in read_only else "mount -o remount,rw"
        return error(
            f"{mount.point} is mounted read-only",
            "nothing can be stored; errors=remount-ro does that after an error of the disk",
            f"dmesg | grep -i {in_shell(Path(Path(mount.source).name))}; then {again} {point}",
        )
    if unsafe := sorted(options & _UNSAFE):
        return warning(
            f"{mount.point} is mounted with {','.join(unsafe)}",
            "after a loss of power the disk may lack what a sync has confirmed",
            f"take it out of /etc/fstab and mount again: mount -o remount,barrier=1 {point}",
        )
    if slow := sorted(options & _SLOW):
        return warning(
            f"{mount.point} is mounted with {','.join(slow)}",
            "each write or read goes to the disk at once, though mqproc syncs where it must",
            f"mount -o remount,async,relatime {point}, and the same in /etc/fstab",
        )
    return ok(",".join(sorted(options & {"rw", "relatime", "noatime", "nodiratime", "lazytime", "discard"})))


def _how_to_write_again(problem: OSError) -> str:
    if problem.errno == errno.EROFS:
        return "dmesg tells why the file system is read-only; mend the disk, check it (fsck), mount it to be written"
    return "make room there, in the file system, the quota and the inodes: df -h; df -i; quota"


def _sync_rate(context: DoctorContext) -> Said | None:
    """Syncs of one page behind the other, in a file without a name."""
    if not os.access(context.place, os.W_OK):
        return None
    try:
        took_ms = median(_syncs_ms(context))
    except FailedSyncError as problem:
        return error(
            f"a sync fails: {problem}",
            "the first one that fails makes a store read-only, since nobody knows what is on the disk",
            "dmesg tells what is wrong with the disk; mend or replace it before a group starts",
        )
    except OSError as problem:
        return error(
            f"{SYNCS * SYNC_BYTES // 1024} KiB cannot be written in {context.place}: {problem.strerror}",
            "sends are refused, and a group cannot make the files that it needs",
            _how_to_write_again(problem),
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
            "the log is durable that much later, and a role in a sync cannot do anything else",
            "iostat -x 1: is the disk busy with something else? Put the store on a disk of its own",
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


def _owner(context: DoctorContext) -> Said | None:
    """Whose the store is: the folder, and every file in it."""
    if context.paths is None or not os.path.isdir(context.paths.root):
        return None
    root = context.paths.root
    uid = root.stat().st_uid
    if uid != os.geteuid() and os.geteuid() != 0:
        return error(
            f"{root} belongs to user {uid}, this is user {os.geteuid()}",
            "a group runs as the store's owner only, so that its sockets and files are nobody else's",
            f"sudo -u '#{uid}' mqproc up {context.store_flag}, or chown -R {os.geteuid()} {context.named}",
        )
    if not context.reachable:
        return error(
            f"user {os.geteuid()} may not look into {root}",
            "nothing of the store can be said",
            f"chmod -R u+rwX {context.named}",
        )
    others = [entry for entry in _entries(root) if entry.stat(follow_symlinks=False).st_uid != uid]
    if others:
        return error(
            f"{others[0].path} belongs to user {others[0].stat(follow_symlinks=False).st_uid}, the store to user {uid}"
            + (f"; {counted(len(others) - 1, 'more file')}" if others[1:] else ""),
            "a start refuses a store with files of another owner (exit code 3): who wrote them is not known",
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


def _modes(context: DoctorContext) -> Said | None:
    if context.paths is None or not context.reachable or not os.path.isdir(context.paths.root):
        return None
    root, own = context.paths.root, context.paths.own
    if root.stat().st_mode & stat.S_IWOTH:
        return error(
            f"everybody may write to {root} (mode {stat.S_IMODE(root.stat().st_mode):04o})",
            "a start refuses it: anybody could put a file in the place of one of the store's",
            f"chmod o-w {context.named}",
        )
    if own.is_dir() and stat.S_IMODE(own.stat().st_mode) & 0o077:
        return warning(
            f"{own} has mode {stat.S_IMODE(own.stat().st_mode):04o}",
            "the sockets in it are meant for the owner only",
            f"chmod 700 {in_shell(own)}",
        )
    if root.is_dir() and not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        return error(f"{root} may not be written", "a start fails", f"chmod u+rwx {context.named}")
    return ok(f"{root} is closed to others")


DISK_CHECKS: Final = (
    Check("space", "disk", "there is room", _space),
    Check("inodes", "disk", "more files can be made", _inodes),
    Check("file-system", "disk", "a file system that keeps what it is given", _file_system),
    Check("mount-options", "disk", "mounted so that syncs mean something", _mount_options),
    Check("sync-rate", "disk", "syncs are quick enough", _sync_rate),
    Check("owner", "access", "the store and all in it have one owner", _owner),
    Check("modes", "access", "nobody else may write to the store", _modes),
)
