"""The cache of compiled kernels: validity of code, trust in folders, writing of files.

Each test runs the kernels of `crc` in processes of their own, with caches in folders of the test.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mqproc.kernels.jit import cache
from mqproc.kernels.jit.compile import COMPILED
from tests.support.group import AS_NOBODY, ROOT, skip_unless_nobody_can_run

pytestmark = pytest.mark.skipif(not COMPILED, reason="nothing is compiled")

NOBODY = 65534
ENVIRONMENT = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
PROGRAM = """
from mqproc.kernels import crc
from mqproc.kernels.jit import cache
crc.warm()
print("compiled" if crc.crc32_update.stats.cache_misses else "loaded", *cache.problems(), sep="; ")
"""
# The clock of a machine that starts without a battery: in 1970.
EARLY_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec %= 86400;
    return failed;
}
"""


@pytest.fixture(scope="module", autouse=True)
def package() -> Iterator[Path]:
    """A copy of the package, in whose installation nothing is compiled."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        ENVIRONMENT["PYTHONPATH"] = folder
        yield copied_package(Path(folder))


@pytest.fixture(scope="module")
def compiled(package: Path) -> Path:
    """A cache folder with the kernels of `crc`."""
    assert run(NUMBA_CACHE_DIR=str(package / "compiled")).startswith("compiled")
    return package / "compiled"


@pytest.fixture
def folder(compiled: Path) -> Iterator[Path]:
    """A copy of that folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        Path(made).chmod(0o755)
        yield Path(shutil.copytree(compiled, Path(made, "compiled")))


def copied_package(folder: Path) -> Path:
    shutil.copytree(ROOT / "mqproc", folder / "mqproc", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(program: str = PROGRAM, *, prefix: Sequence[str] = (), **environment: str) -> str:
    """Run Python with these variables; its output."""
    return finished(started(program, prefix=prefix, **environment))


def started(program: str = PROGRAM, *, prefix: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", program],
        env=ENVIRONMENT | environment,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


@pytest.fixture
def make_package(tmp_path: Path) -> Callable[[str], Path]:
    """Copies of the package, as in other environments."""

    def make(name: str) -> Path:
        return copied_package(tmp_path / name)

    return make


# Validity


def test_cache_of_user_serves_all_environments(tmp_path: Path, make_package: Callable[[str], Path]) -> None:
    home, other = str(tmp_path / "home"), make_package("other")
    for path in other.rglob("*.py"):
        os.utime(path, (1, 1))
    first, second = run(PYTHONPATH=str(make_package("first")), HOME=home), run(PYTHONPATH=str(other), HOME=home)
    assert (first, second) == ("compiled", "loaded")
    (entries,) = (tmp_path / "home" / ".cache" / "mqproc").iterdir()
    assert len(entries.name) == 32
    assert run(HOME=home, XDG_CACHE_HOME=str(tmp_path / "home" / ".cache")) == "loaded"


def test_cache_is_used_without_asserts_and_docstrings(folder: Path) -> None:
    assert run(NUMBA_CACHE_DIR=str(folder), PYTHONOPTIMIZE="2") == "loaded"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_cache_is_written_and_used_with_clock_behind_the_installation(tmp_path: Path) -> None:
    (tmp_path / "early.c").write_text(EARLY_CLOCK)
    library = str(tmp_path / "early.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "early.c", "-ldl"], check=True, timeout=60)
    assert run("import time; print(time.time_ns() < 86_400 * 10**9)", LD_PRELOAD=library) == "True"
    named = str(tmp_path / "compiled")
    results = [run(NUMBA_CACHE_DIR=named, LD_PRELOAD=library) for _ in range(2)]
    assert results == ["compiled", "loaded"]


def test_cache_of_other_sources_or_compiler_options_is_not_used(
    folder: Path, make_package: Callable[[str], Path]
) -> None:
    changed = make_package("changed")
    with (changed / "mqproc" / "layout" / "record.py").open("a") as source:
        source.write("# Changed.\n")
    assert run(PYTHONPATH=str(changed), NUMBA_CACHE_DIR=str(folder)) == "compiled"
    assert run(NUMBA_CACHE_DIR=str(folder), NUMBA_OPT="1") == "compiled"
    assert run(NUMBA_CACHE_DIR=str(folder)) == "loaded"


def test_cache_is_not_written_after_upgrade_of_running_process(
    tmp_path: Path, make_package: Callable[[str], Path]
) -> None:
    package = make_package("upgraded")
    source = package / "mqproc" / "kernels" / "hashing.py"
    upgrade = f"import mqproc, os; os.utime({str(source)!r}, (1, 1))\n"
    result = run(upgrade + PROGRAM, PYTHONPATH=str(package), NUMBA_CACHE_DIR=str(tmp_path / "compiled"))
    assert result.startswith("compiled; the package's files ")
    later = PROGRAM.replace("crc.warm()", f"crc.crc32(crc.np.zeros(9, 'u1'), 0, 9)\n{upgrade}\ncrc.warm()")
    kept = run(later, PYTHONPATH=str(package), NUMBA_CACHE_DIR=str(tmp_path / "compiled"))
    assert kept == "compiled"
    assert not list((tmp_path / "compiled").rglob("crc.write_crc_tail*"))


# A wheel ships code for a baseline processor


SHIP = """
import sys
from pathlib import Path
from mqproc.kernels import crc
from mqproc.kernels.jit import cache
crc.warm()
(folder,) = Path(sys.argv[1]).iterdir()
cache.copy_code(folder, cache.SHIPPED / folder.name)
"""


@pytest.mark.skipif(cache.baseline() is None, reason="no wheel is compiled for this processor")
def test_cache_of_wheel_is_used_where_it_matches(tmp_path: Path, make_package: Callable[[str], Path]) -> None:
    package, home = make_package("wheel"), str(tmp_path / "home")
    target = dict(zip(("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"), cache.BASELINES[platform.machine()], strict=True))
    ship = SHIP.replace("sys.argv[1]", repr(str(tmp_path / "built")))
    run(ship, PYTHONPATH=str(package), NUMBA_CACHE_DIR=str(tmp_path / "built"), **target)
    shipped = package / "mqproc" / "kernels" / "compiled"
    assert run(PYTHONPATH=str(package), HOME=home) == "loaded"
    assert not (tmp_path / "home").exists()
    # The umask of the installation applies to its sources, too.
    for path in (shipped, *shipped.rglob("*"), *package.rglob("cache.py")):
        path.chmod(path.stat().st_mode | 0o020)
    assert run(PYTHONPATH=str(package), HOME=home) == "loaded"
    next(package.rglob("cache.py")).chmod(0o644)
    assert run(PYTHONPATH=str(package), HOME=home).startswith(f"compiled; {shipped} is not used")
    # All code for this processor is better.
    for path in (shipped, *shipped.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o020)
    (own,) = (tmp_path / "home" / ".cache" / "mqproc").iterdir()
    (own / "full").touch(0o600)
    assert run("from mqproc.kernels.jit import cache; print(cache.full_folder())", HOME=home) == str(own)


MARK = """
from mqproc.kernels.jit import cache
folder = cache.SHIPPED / cache._fingerprint_for(cache.baseline())
cache.make_folder(folder)
cache.mark_full(folder)
print(cache.full_folder())
"""


@pytest.mark.skipif(cache.baseline() is None, reason="no wheel is compiled for this processor")
@pytest.mark.parametrize("change", [{"NUMBA_CPU_NAME": "generic"}, {"NUMBA_CPU_FEATURES": ""}, {"NUMBA_OPT": "1"}])
def test_cache_of_wheel_is_not_used_elsewhere(package: Path, change: dict[str, str]) -> None:
    made = package / "mqproc" / "kernels" / "compiled"
    found = run(MARK)
    assert found == str(made / Path(found).name)
    assert run("from mqproc.kernels.jit import cache; print(cache.full_folder())", **change) == "None"
    shutil.rmtree(made)


# Two processes


def test_cache_kernel_is_compiled_by_one_of_two_processes(tmp_path: Path) -> None:
    turns = PROGRAM.replace(
        "crc.warm()", f"cache.take_turns(__import__('pathlib').Path({str(tmp_path)!r}))\ncrc.warm()"
    )
    both = [started(turns, NUMBA_CACHE_DIR=str(tmp_path / "compiled")) for _ in range(2)]
    assert sorted(map(finished, both)) == ["compiled", "loaded"]


def test_cache_turn_ends_when_another_process_has_compiled(tmp_path: Path) -> None:
    """The second process finds the code after its wait, and lets a third one compile again."""
    turns = PROGRAM.replace(
        "crc.warm()",
        f"cache.take_turns(__import__('pathlib').Path({str(tmp_path)!r}))\ncrc.warm()\n"
        "pid = __import__('os').getpid()\n"
        "locks = [line for line in open('/proc/locks') if f' {pid} ' in line]\n"
        "assert locks == [], locks",
    )
    both = [started(turns, NUMBA_CACHE_DIR=str(tmp_path / "compiled")) for _ in range(2)]
    assert sorted(map(finished, both)) == ["compiled", "loaded"]


# Trust


def read_only(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)


def test_cache_of_root_that_is_read_only_serves_other_users(folder: Path) -> None:
    skip_unless_nobody_can_run()
    read_only(folder)
    assert run(prefix=AS_NOBODY, NUMBA_CACHE_DIR=str(folder)).startswith("loaded")


def test_cache_in_installation_of_root_serves_other_users(folder: Path) -> None:
    skip_unless_nobody_can_run()
    package = folder.parent / "installed"
    copied_package(package)
    inside = package / cache.INSTALLED.relative_to(ROOT)
    shutil.copytree(folder, inside)
    read_only(package)
    for named in ("", str(folder.parent / "missing")):
        assert run(PYTHONPATH=str(package), prefix=AS_NOBODY, NUMBA_CACHE_DIR=named).startswith("loaded")


@pytest.mark.parametrize(("mode", "inner"), [(0o775, False), (0o757, True)])
def test_cache_folder_writable_by_others_is_refused(folder: Path, mode: int, inner: bool) -> None:
    refused = next(folder.iterdir()) if inner else folder
    refused.chmod(mode)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    result = run(NUMBA_CACHE_DIR=str(folder), HOME=str(folder.parent))
    assert result.startswith("compiled; ")
    assert f"{refused} is not used for compiled code, as it can be written by other users" in result
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert run(NUMBA_CACHE_DIR=str(folder), HOME=str(folder.parent)).startswith("loaded; ")


def test_cache_file_writable_by_others_is_replaced(folder: Path) -> None:
    code = list(folder.rglob("*.nbc"))
    for path in code:
        path.chmod(0o666)
    assert run(NUMBA_CACHE_DIR=str(folder)) == "compiled"
    assert {path.stat().st_mode & 0o777 for path in code} == {0o644}
    assert run(NUMBA_CACHE_DIR=str(folder)) == "loaded"


def test_cache_of_another_user_is_refused(folder: Path) -> None:
    skip_unless_nobody_can_run()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    result = run(NUMBA_CACHE_DIR=str(folder), HOME=str(folder.parent))
    assert result.startswith("compiled; ")
    assert f"{folder} is not used for compiled code, as it belongs to user {NOBODY}" in result


def test_cache_without_writable_folder_names_each_of_them(folder: Path) -> None:
    skip_unless_nobody_can_run()
    home = folder.parent / "home"
    home.mkdir(0o755)
    result = run(prefix=AS_NOBODY, HOME=str(home), NUMBA_CACHE_DIR=str(folder.parent / "new"))
    assert result.startswith(f"compiled; {folder.parent} is not writable; {home} is not writable; ")


# Files


def test_cache_files_are_readable_by_all_whatever_the_umask(tmp_path: Path) -> None:
    run("import os; os.umask(0o077)\n" + PROGRAM, NUMBA_CACHE_DIR=str(tmp_path / "compiled"))
    found = [tmp_path / "compiled", *(tmp_path / "compiled").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in found} == {0o755, 0o644}


def test_cache_damaged_files_are_compiled_again(folder: Path) -> None:
    for number, path in enumerate(sorted(folder.rglob("*.nbc"))):
        data = path.read_bytes()
        path.write_bytes([data[:-1], bytes(len(data)), b""][number % 3])
    assert [run(NUMBA_CACHE_DIR=str(folder)) for _ in range(2)] == ["compiled", "loaded"]


def test_cache_written_by_two_processes_at_once_is_whole(tmp_path: Path) -> None:
    both = [started(NUMBA_CACHE_DIR=str(tmp_path / "compiled")) for _ in range(2)]
    assert [finished(process) for process in both] == ["compiled", "compiled"]
    assert run(NUMBA_CACHE_DIR=str(tmp_path / "compiled")) == "loaded"
    assert {path.suffix for path in (tmp_path / "compiled").rglob("*") if path.is_file()} == {".nbc"}


def test_cache_failed_write_leaves_kernels_usable_and_is_reported(tmp_path: Path) -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    result = run(limited + PROGRAM, NUMBA_CACHE_DIR=str(tmp_path / "compiled"))
    assert result.startswith("compiled; ")
    assert result.endswith(" cannot be written: File too large")
    assert not [path for path in (tmp_path / "compiled").rglob("*") if path.is_file()]


def test_delete_unused_keeps_recently_used_versions(tmp_path: Path) -> None:
    versions = [tmp_path / f"{number:032x}" for number in range(12)]
    for number, version in enumerate(versions):
        version.mkdir()
        os.utime(version, (number, number))
    other, current = tmp_path / "spark.jsa", tmp_path / f"{99:032x}"
    other.touch()
    cache.make_folder(current)
    (current / ".killed.tmp").touch()
    cache.mark_used(versions[0])
    cache.mark_full(current)
    assert cache.is_full(current)
    cache.delete_unused(current)
    assert set(tmp_path.iterdir()) == {other, current, versions[0], *versions[6:]}
    assert [path.name for path in current.iterdir()] == ["full"]
