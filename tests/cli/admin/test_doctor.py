"""`mqproc doctor` finds problems and their fixes, and nothing on a healthy machine.

Problems are planted in a real group's store files, in options, in process limits and in copies of /proc and /sys.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mqproc.cli.admin.doctor import CHECKS, examine
from mqproc.cli.admin.doctor.context import DoctorFinding, Host, Level, PythonBuild, read_context
from mqproc.cli.options import Invocation
from mqproc.io.store_io import FailedSyncError, StoreIO
from mqproc.ipc.control import Control
from mqproc.layout import control as words_of
from mqproc.paths import StorePaths
from tests.golden.fixtures import load_fixture, options_of
from tests.support.command_line import PseudoTerminal, call
from tests.support.group import AS_NOBODY, SMALL, START_TIMEOUT_S, Group, skip_unless_nobody_can_run

# A healthy machine as kernel files; tests change one of them.


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
    """Host of a healthy machine below `root`; `changes` are contents by file name."""
    known = {name.rpartition("/")[2]: name for name in _FILES} | {"cpu_max": "sys/fs/cgroup/cpu.max"}
    for name, text in {**_FILES, **{known[key]: text for key, text in changes.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root / "proc", root / "sys", clock_synchronized, PYTHONS[python])


def limits(name: str, value: int) -> str:
    """/proc/PID/limits with one limit lowered."""
    lines = [line for line in _LIMITS.splitlines() if not line.startswith(name)]
    return "\n".join([*lines, f"{name:<25} {value:<20} {value:<20} units"])


HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def written_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cleanly stopped store with 2,000 messages, one key each."""
    store = tmp_path_factory.mktemp("written") / "store"
    group = Group(store).start()
    try:
        with group.client() as client:
            client.send_batch("orders", [b"%4d" % n * 50 for n in range(2000)], keys=[f"key-{n}" for n in range(2000)])
            client.wait_dispatched()
        assert group.stop() == 0
    finally:
        group.close()
    yield store
    shutil.rmtree(store)


@pytest.fixture(autouse=True)
def half_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the disk usage that these tests see."""
    monkeypatch.setattr(StoreIO, "disk_usage", lambda self, path: (100 << 30, 100 << 30))


@pytest.fixture
def store(written_store: Path, tmp_path: Path) -> StorePaths:
    """A copy that a test may damage; its name needs quotes in a shell."""
    return StorePaths(Path(shutil.copytree(written_store, tmp_path / "my store", symlinks=True)))


def diagnose(store: StorePaths | None, tmp_path: Path, *flags: str, **host: str) -> list[DoctorFinding]:
    """Findings of the doctor about a store on a machine."""
    synchronized = host.pop("clock", "kept") == "kept"
    machine = make_host(tmp_path / "host", clock_synchronized=synchronized, **host)
    return examine(read_context(Invocation(store=store.root if store else None, set_=list(flags)), machine))


def problems_of(found: list[DoctorFinding]) -> list[DoctorFinding]:
    return [finding for finding in found if finding.level is not Level.OK]


@dataclass(frozen=True)
class Case:
    """A problem: how to plant it, which check finds it, and words of the finding and its fix."""

    check: str
    found: str
    fix: str
    plant: Callable[[StorePaths], object] = lambda paths: None
    flags: tuple[str, ...] = ()
    host: dict[str, str] = field(default_factory=dict)
    level: Level = Level.WARNING
    root: bool = False


def set_words(paths: StorePaths, **values: int) -> None:
    control = Control.open(StoreIO(), paths, write=True)
    for name, value in values.items():
        control.store(words_of.WORDS[name].index, value)
    control.close()


def much_an_hour(paths: StorePaths) -> None:
    now_ms = round(time.time() * 1000)
    set_words(
        paths,
        oldest_store_timestamp_ms=now_ms - HOUR_MS,
        written_store_timestamp_ms=now_ms,
        written=1 << 44,
        min_physical_offset=0,
    )


def from_tomorrow(paths: StorePaths) -> None:
    set_words(paths, written_store_timestamp_ms=round(time.time() * 1000) + 24 * HOUR_MS)


def overwrite(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.write(data)


def first_segment(paths: StorePaths) -> Path:
    return paths.commit_log / f"{0:020d}"


def damage(paths: StorePaths) -> None:
    hole = {"start": 4096, "stop": 8192, "kind": "bad magic", "first_seen_ms": 1, "filled": False}
    paths.damage.write_text(json.dumps({"holes": [hole], "cuts": []}))


CASES = [
    Case("nofile", "300 files may be open", "LimitNOFILE=65536", host={"limits": limits("Max open files", 300)},
         level=Level.ERROR),
    Case("fsize", "larger than 4.0 KiB", "ulimit -f unlimited", host={"limits": limits("Max file size", 4096)},
         level=Level.ERROR),
    Case("nproc", "12 processes are allowed", "ulimit -u", host={"limits": limits("Max processes", 12)},
         level=Level.ERROR),
    Case("max-map-count", "vm.max_map_count = 1,024", "sysctl -w vm.max_map_count=65530",
         host={"max_map_count": "1024"}),
    Case("overcommit", "overcommit_memory = 2", "sysctl -w vm.overcommit_memory=0", host={"overcommit_memory": "2"}),
    Case("dirty-pages", "16.0 MiB", "sysctl -w vm.dirty_background_ratio=10 vm.dirty_ratio=20",
         host={"dirty_bytes": str(16 << 20), "dirty_background_bytes": str(8 << 20)}),
    Case("huge-pages", "always", "echo madvise >", host={"enabled": "[always] madvise never"}, level=Level.NOTE),
    Case("swap", "vm.swappiness = 60", "sysctl -w vm.swappiness=1", level=Level.NOTE,
         host={"meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\nSwapTotal: 2000000 kB\n"}),
    Case("memory", "97.7 MiB", "MemoryMax=", host={"meminfo": "MemTotal: 200000 kB\nMemAvailable: 100000 kB\n"}),
    Case("processor", "carry-less", "-cpu host", host={"cpuinfo": "flags : fpu sse2"}, level=Level.NOTE),
    Case("python", "3.12.4 at /home/me/.pyenv/versions/3.12.4", "--enable-optimizations --with-lto",
         host={"python": "slow"}, level=Level.NOTE),
    Case("python", "debug build", "a Python of the distribution", host={"python": "debug"}),
    Case("processor-share", "0.50 processors", "--cpus 2", host={"cpu_max": "50000 100000"}),
    Case("clock-synchronized", "nothing keeps the clock right", "timedatectl set-ntp true", host={"clock": "free"}),
    Case("clock-steps", "24 h 00 m from now", "chronyc makestep", from_tomorrow),
    Case("clock-steps", "go back 3 times", "makestep at boot only",
         lambda paths: set_words(paths, writer_clock_steps=3)),
    Case("file-system", "nfs4 on server:/export", "cp -a", level=Level.ERROR,
         host={"mountinfo": "22 1 0:50 / / rw - nfs4 server:/export rw,vers=4.2\n"}),
    Case("mount-options", "nobarrier", "barrier=1",
         host={"mountinfo": "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw,nobarrier\n"}),
    Case("mount-options", "read-only", "mount -o remount,rw", level=Level.ERROR,
         host={"mountinfo": "22 1 8:1 / / ro,relatime - ext4 /dev/sda1 ro\n"}),
    Case("mount-options", "read-only", "umount, fsck and mount /", level=Level.ERROR,
         host={"mountinfo": "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw,errors=remount-ro,emergency_ro\n"}),
    Case("modes", "mode 0777", "chmod o-w", lambda paths: paths.root.chmod(0o777), level=Level.ERROR),
    Case("modes", "mode 0755", "chmod 700", lambda paths: paths.own.chmod(0o755)),
    Case("owner", "belongs to user 65534", "chown -R 0", lambda paths: os.chown(paths.topics, 65534, -1),
         level=Level.ERROR, root=True),
    Case("index-slots", "will share 1,000 slots", "max_hash_slot_num=5000", lambda paths: shutil.rmtree(paths.index),
         flags=("max_hash_slot_num=1000",)),
    Case("retention", "for 72 h (file_reserved_time)", "file_reserved_time=1", much_an_hour,
         flags=("file_reserved_time=72",)),
    Case("disk-ratios", "not in this order", "disk_max_used_space_ratio=85", flags=("disk_max_used_space_ratio=95",)),
    Case("file-sizes", "2,097,152 (--set), but the store's files have 1,048,576",
         "--set mapped_file_size_commit_log=1048576", flags=("mapped_file_size_commit_log=2097152",)),
    Case("message-size", "a segment has 1,048,576 bytes", "--set max_message_size=1046528",
         flags=("max_message_size=2097152",)),
    Case("message-size", "max_frame_bytes = 8,388,608", "--set max_frame_bytes=16777216",
         flags=("max_message_size=8388608", "max_frame_bytes=8388608")),
    Case("late-deliveries", "is kept 24 h", "--set file_reserved_time=72", flags=("file_reserved_time=24",)),
    Case("loss-window", "600,000 ms", "flush_commit_log_thorough_interval=10000",
         flags=("flush_commit_log_thorough_interval=600000",)),
    Case("queue-count", "deleted ones included, and max_queues = 16", "--set max_queues=32", flags=("max_queues=16",),
         plant=lambda paths: [shutil.copytree(paths.consume_queue / "orders", paths.consume_queue / "more")]),
    Case("monitor-address", "0.0.0.0", "--set metrics_host=127.0.0.1", flags=("metrics_host=0.0.0.0",),
         level=Level.NOTE),
    Case("read-only", "a sync has failed", "mqproc store repair", lambda paths: paths.read_only.write_text("5"),
         level=Level.ERROR),
    Case("known-damage", "1 damaged range of the log, the first at 4,096", "mqproc store verify", damage),
    Case("files", "commitlog/notes.txt: stray file", "mqproc store repair",
         lambda paths: (paths.commit_log / "notes.txt").write_text("hello"), level=Level.ERROR),
    Case("files", "segment short", "mqproc store repair", lambda paths: os.truncate(first_segment(paths), 5000),
         level=Level.ERROR),
    Case("first-records", "does not begin with a record", "mqproc store verify",
         lambda paths: overwrite(first_segment(paths), b"garbage, not a record"), level=Level.ERROR),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.check}: {case.found}")
def test_doctor_finds_problem_with_its_fix(case: Case, store: StorePaths, tmp_path: Path) -> None:
    if case.root and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    case.plant(store)
    found = {finding.check: finding for finding in problems_of(diagnose(store, tmp_path, *case.flags, **case.host))}
    finding = found[case.check]
    assert case.found in finding.found
    assert case.fix in finding.fix
    assert f" {store.root}" not in finding.fix
    assert finding.level is case.level
    assert finding.why


@pytest.mark.parametrize("options", ["ro", "rw,nobarrier", "rw,sync"])
def test_doctor_quotes_the_mount_point(store: StorePaths, tmp_path: Path, options: str) -> None:
    point = str(store.root).replace(" ", r"\040")
    found = diagnose(store, tmp_path, mountinfo=f"22 1 8:1 / {point} rw,relatime - ext4 /dev/sda1 {options}\n")
    (finding,) = (finding for finding in found if finding.check == "mount-options")
    assert f" '{store.root}'" in finding.fix


def test_doctor_accepts_python_of_a_distribution(store: StorePaths, tmp_path: Path) -> None:
    assert problems_of(diagnose(store, tmp_path, python="distribution")) == []


def test_doctor_healthy_machine_has_no_findings(store: StorePaths, tmp_path: Path) -> None:
    found = diagnose(store, tmp_path)
    assert problems_of(found) == []
    assert {finding.check for finding in found} >= {"index-slots", "files", "first-records", "space", "nofile"}


@pytest.mark.parametrize("name", ["a_basic", "g1_retention"])
def test_doctor_checks_a_rocketmq_store(name: str, tmp_path: Path) -> None:
    fixture = load_fixture(name, tmp_path / "golden")
    options = options_of(fixture.expected)
    fits = f"max_message_size={options.max_message_size}"
    store = StorePaths(fixture.store)
    store.root.chmod(0o700)
    assert [finding.check for finding in problems_of(diagnose(store, tmp_path, "metrics_port=0"))] == ["message-size"]
    assert problems_of(diagnose(store, tmp_path, "metrics_port=0", fits)) == []


def test_doctor_checks_a_running_group(make_group: Callable[..., Group], tmp_path: Path) -> None:
    group = make_group()
    found = diagnose(group.paths, tmp_path)
    assert problems_of(found) == []
    assert {finding.check for finding in found} >= {"group", "held-segments", "changed-options", "sockets"}
    supervisor = group.pid(words_of.SUPERVISOR)
    limit = next(line for line in Path(f"/proc/{supervisor}/limits").read_text().splitlines() if "open files" in line)
    soft, hard = limit.split()[3:5]
    assert soft == hard

    changed = {each.check: each for each in problems_of(diagnose(group.paths, tmp_path, "file_reserved_time=100"))}
    assert changed["changed-options"].fix == f"kill -HUP {supervisor}"
    changed = {each.check: each for each in problems_of(diagnose(group.paths, tmp_path, "max_queues=1024"))}
    assert changed["changed-options"].fix.startswith(f"mqproc down --store {group.store}; mqproc up")

    group.paths.socket("query").unlink()
    deaf = {each.check: each for each in problems_of(diagnose(group.paths, tmp_path))}["sockets"]
    assert (deaf.level, "query.sock" in deaf.found) == (Level.ERROR, True)


def test_doctor_group_that_ends_during_the_checks(make_group: Callable[..., Group], tmp_path: Path) -> None:
    group = make_group()
    context = read_context(Invocation(store=group.store, set_=[]), make_host(tmp_path / "host"))
    shutil.move(group.paths.control, tmp_path / "control")
    found = {each.check: each for each in problems_of(examine(context))}["group"]
    shutil.move(tmp_path / "control", group.paths.control)
    assert (found.level, str(group.paths.control) in found.found) == (Level.ERROR, True)
    assert found.fix.startswith("mqproc down")


def test_doctor_accepts_a_group_of_another_version(make_group: Callable[..., Group], tmp_path: Path) -> None:
    group = make_group()
    holder = group.words()["supervisor_pid"]
    with StorePaths(group.store).control.open("r+b") as file:
        file.seek(words_of.HEADER_VERSION * words_of.WORD_SIZE)
        file.write((words_of.VERSION - 1).to_bytes(8, "little"))
    reported = call("doctor", "--store", group.store)
    assert "a group of another version runs" in reported.out
    # An empty log, a preallocated segment and `abort` are normal while a group holds the store.
    found = {each.check: each for each in diagnose(StorePaths(group.store), tmp_path)}
    assert [name for name, each in found.items() if each.level is Level.ERROR] == []
    assert (found["lock"].level, f"pid {holder}" in found["lock"].found) == (Level.WARNING, True)
    assert "mqproc down" in found["lock"].fix
    assert "first-records" not in found
    status = call("status", "--store", group.store)
    assert (status.code, "from another version of mqproc" in status.err) == (3, True)
    assert call("down", "--store", group.store).code == 0
    assert call("doctor", "--store", group.store).out.count("another version") == 0


def test_doctor_narrow_terminal(tmp_path: Path) -> None:
    with PseudoTerminal("doctor", "--store", tmp_path / "store", columns=8, lines=60) as terminal:
        assert terminal.end() in (0, 1)
    assert b"checks found nothing" in terminal.raw


def test_doctor_group_at_terminal_needs_a_restart(tmp_path: Path) -> None:
    """SIGHUP at a terminal stops the group."""
    paths = StorePaths(tmp_path / "store")
    flags = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
    with PseudoTerminal("up", "--store", paths.root, *flags) as terminal:
        terminal.until("group ready", timeout_s=START_TIMEOUT_S)
        changed = {each.check: each for each in problems_of(diagnose(paths, tmp_path, "file_reserved_time=100"))}
        assert changed["changed-options"].fix.startswith(f"mqproc down --store {paths.root}; mqproc up")
        terminal.process.send_signal(signal.SIGHUP)
        assert terminal.end() == 0


def test_doctor_fix_for_index_slots_works(make_group: Callable[..., Group]) -> None:
    group = make_group(max_hash_slot_num=50)
    with group.client() as client:
        client.send_batch("orders", [b"x"] * 2000, keys=[f"key-{n}" for n in range(2000)])
        client.wait_dispatched()
    assert group.stop() == 0
    found = call("doctor", "--store", group.store, "--json").json["findings"]
    slots = next(finding for finding in found if finding["check"] == "index-slots")
    assert slots["level"] == "warning"
    assert "share 50 slots: 40 a slot" in slots["found"] or "share 50 slots: 80 a slot" in slots["found"]
    remove, start = slots["mend"].split("; ")
    assert remove == f"rm -r {group.paths.index}"
    subprocess.run(remove.split(), check=True, timeout=10)
    flags = [part for name, value in group.options.items() for part in ("--set", f"{name}={value}")]
    command = start.split()
    assert command[:2] == ["mqproc", "up"]
    # The flags of the fix come last and win.
    process = subprocess.Popen([sys.executable, "-m", "mqproc", "up", *flags, *command[2:]], stdout=subprocess.DEVNULL)
    group.process = process
    try:
        with contextlib.ExitStack() as stack:
            from tests.support.group import wait_until

            wait_until(group.ready, 60, "the group with its new index")
            client = stack.enter_context(group.client())
            assert [message.body for message in client.by_key("orders", "key-1234")] == [b"x"]
        found = call("doctor", "--store", group.store, "--json").json["findings"]
        assert next(finding for finding in found if finding["check"] == "index-slots")["level"] == "ok"
    finally:
        assert group.stop() == 0


@pytest.mark.parametrize(
    ("shell", "check"),
    [("ulimit -n 300", "nofile"), ("ulimit -f 100", "fsize"), ("export NUMBA_DISABLE_JIT=1", "processor")],
)
def test_doctor_checks_limits_of_the_calling_shell(shell: str, check: str, store: StorePaths) -> None:
    command = f"{shell}; exec {sys.executable} -m mqproc doctor --store '{store.root}' --json"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert check in {finding["check"] for finding in found["findings"] if finding["level"] == "error"}
    assert (found["healthy"], found["running"], found["errors"] >= 1) == (False, False, True)


def test_doctor_reports_a_lock_of_another_program(store: StorePaths, tmp_path: Path) -> None:
    script = (
        "import fcntl,sys; f=open(sys.argv[1],'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print('held',flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script, store.lock], stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        lock = {each.check: each for each in problems_of(diagnose(store, tmp_path))}["lock"]
        other.communicate(b"\n", timeout=10)
    assert f"pid {other.pid}" in lock.found
    assert f"ps -fp {other.pid}" in lock.fix
    with store.lock.open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_doctor_reports_an_inaccessible_store(written_store: Path) -> None:
    skip_unless_nobody_can_run()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        store = shutil.copytree(written_store, f"{folder}/store")
        Path(store).chmod(0o700)
        command = [*AS_NOBODY, sys.executable, "-m", "mqproc"]
        environment = {"PYTHONPATH": os.fspath(Path(__file__).parents[3]), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*command, "doctor", "--store", store, "--json", "--set", "metrics_port=0"],
            env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert "belongs to user 0, this is user 65534" in found["owner"]["found"]
    assert found["owner"]["mend"].startswith(f"sudo -u '#0' mqproc up --store {store}")
    assert "read-only" not in found


def test_doctor_reports_a_store_in_memory(tmp_path: Path) -> None:
    found = call("doctor", "--store", "/dev/shm/no-such-store", "--json").json["findings"]
    system = next(finding for finding in found if finding["check"] == "file-system")
    if not system["found"].startswith("tmpfs"):
        pytest.skip(f"/dev/shm is no tmpfs here: {system['found']}")
    assert system["level"] == "warning"
    assert "cp -a" in system["mend"]


@pytest.mark.parametrize(
    ("call_of_io", "problem", "reported"),
    [
        ("pwrite", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "48 KiB cannot be written in {}: No space left"),
        ("pwrite", OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "48 KiB cannot be written in {}: Disk quota"),
        ("pwrite", OSError(errno.EROFS, os.strerror(errno.EROFS)), "48 KiB cannot be written in {}: Read-only"),
        ("sync", FailedSyncError(errno.EIO, os.strerror(errno.EIO)), "a sync fails: "),
    ],
)
def test_doctor_reports_a_disk_that_fails_writes(
    store: StorePaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call_of_io: str,
    problem: OSError,
    reported: str,
) -> None:
    def fails(*_arguments: object) -> None:
        raise problem

    monkeypatch.setattr(StoreIO, call_of_io, fails)
    found = {each.check: each for each in problems_of(diagnose(store, tmp_path))}
    assert found["sync-rate"].level is Level.ERROR
    assert found["sync-rate"].found.startswith(reported.format(store.root))
    assert found["sync-rate"].fix.startswith(
        "free space" if problem.errno in (errno.ENOSPC, errno.EDQUOT) else "look into dmesg"
    )


def test_doctor_continues_after_a_failing_check(
    store: StorePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "some/file")

    monkeypatch.setattr(StoreIO, "disk_usage", fails)
    found = diagnose(store, tmp_path)
    assert {each.check for each in problems_of(found)} == {"space", "segment-size"}
    assert found[0].level is Level.ERROR
    assert "Input/output error: 'some/file'" in found[0].found
    assert len(found) > 20


def test_doctor_reports_a_port_in_use(store: StorePaths, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = {each.check: each for each in problems_of(diagnose(store, tmp_path, f"metrics_port={port}"))}
    assert f"127.0.0.1:{port} is taken" in found["monitor-port"].found
    assert f"--set metrics_port={port + 1}" in found["monitor-port"].fix


def test_doctor_fix_names_the_config_file(store: StorePaths, tmp_path: Path) -> None:
    file = tmp_path / "mqproc.toml"
    file.write_text("file_reserved_time = 24\n")
    found = call("doctor", "--store", store.root, "--config", file, "--json").json["findings"]
    late = next(finding for finding in found if finding["check"] == "late-deliveries")
    assert late["mend"] == f"write file_reserved_time = 72 into {file}"


def test_doctor_text_matches_json(store: StorePaths) -> None:
    paths = store
    paths.read_only.write_text("5")
    text = call("doctor", "--store", paths.root)
    assert text.code == 1
    lines = text.out.splitlines()
    at = next(number for number, line in enumerate(lines) if "✗ read-only" in line)
    assert lines[at + 1].startswith("    why   it is unknown which of the newest messages")
    fix = next(line for line in lines[at + 2 :] if line.startswith("    fix   "))
    assert fix.startswith("    fix   look into dmesg")
    assert "1 error" in lines[-1]
    assert "✓" not in text.out
    assert "✓ store" in call("doctor", "--store", paths.root, "--all").out
    rows = call("doctor", "--store", paths.root, "--output", "csv").out.splitlines()
    assert rows[0] == "level,area,check,found,why,mend"
    assert rows[1].startswith("error,store,read-only,")


def test_doctor_list_names_every_check() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    listed = call("doctor", "--list", "--json").json["checks"]
    assert [row["check"] for row in listed] == names
    assert all(row["asks"] for row in listed)


def test_doctor_without_store_checks_the_machine(tmp_path: Path) -> None:
    found = diagnose(None, tmp_path, "metrics_port=0")
    assert problems_of(found) == []
    assert not {finding.area for finding in found} & {"store", "group"}


def test_doctor_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    doctor, status = (call(command, "--store", file) for command in ("doctor", "status"))
    assert (doctor.code, doctor.err) == (status.code, status.err)
    assert (doctor.code, doctor.err.count("\n")) == (3, 1)
