"""The cache of compiled kernels on disk: where it is, and which of its code is valid.

    <folder>/<fingerprint>/<module>.<function>-<line>.<digest>.nbc   code for one signature, after its SHA-256
    <folder>/<fingerprint>/full                                      every kernel is there
    <folder>/<fingerprint>/lock                                      each byte is locked by the compiler of one kernel

The fingerprint covers the sources of all kernels, the versions of Python, numba, llvmlite and numpy, the processor, and
numba's compiler options. It alone decides whether code is valid; file times and bytecode do not.

Code is loaded from the first of these folders that has it, and written to the first that is writable:

    NUMBA_CACHE_DIR             if set
    ~/.cache/mqproc             one for all environments of a user; below XDG_CACHE_HOME if set
    the installation's own      in `kernels/__pycache__`; root's `mqproc warm` fills it for all users
    the wheel's                 in `kernels/compiled`, for `BASELINES`; used while no other folder has all code
    the store's                 for a group whose user can write none of the folders above

Compiled code can do anything. So folders and files must belong to this user or root, and other users must not be able
to write them.
"""

# mypy: allow-untyped-calls, allow-subclassing-any

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import os
import pickle
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from mqproc.kernels.jit.library import CalleeLibrary
from mqproc.util import sources

# The parts of numba used here exceed its type stubs.
_config: Any = numba.config

INSTALLED: Final = Path(sources.PACKAGE, "kernels", "__pycache__", "compiled")
"""The installation's own folder."""
SHIPPED: Final = Path(sources.PACKAGE, "kernels", "compiled")
"""Code in a wheel."""

BASELINES: Final = {"x86_64": ("x86-64-v3", "+pclmul"), "aarch64": ("generic", "")}
"""LLVM's name of the processor that a wheel's code is compiled for, and features in addition."""
_BASELINE_FEATURES: Final = {
    "x86_64": "avx avx2 bmi bmi2 cx16 f16c fma lzcnt movbe pclmul popcnt sahf sse3 sse4.1 sse4.2 ssse3 xsave",
    "aarch64": "",
}

_LOCK: Final = "lock"
_FULL: Final = "full"
_CODE_SUFFIX: Final = ".nbc"
_FINGERPRINT: Final = re.compile("[0-9a-f]{32}")
_NAME_DIGITS: Final = 16
_DIGEST_BYTES: Final = 32
# Fingerprints whose code is kept in one folder.
_VERSIONS_MAX: Final = 8
_FOLDER_MODE: Final = 0o755
_FILE_MODE: Final = 0o644

_only: list[Path] = []
_write_errors: list[str] = []
_names: set[str] = set()


# Validity


@functools.cache
def sources_fingerprint(package: str = sources.PACKAGE) -> str:
    """SHA-256 of all sources that compiled code may depend on."""
    digest = hashlib.sha256()
    for name in sources.kernel_sources(package):
        digest.update(f"{name}\0".encode() + Path(package, name).read_bytes())
    return digest.hexdigest()


Target = tuple[str, str, str]
"""System, processor and features that kernels are compiled for, as LLVM names them."""


def own_target() -> Target:
    """The target that numba compiles for in this process."""
    found: Target = cpu_target.target_context.codegen().magic_tuple()
    return found


@functools.cache
def target() -> Target:
    """The target of this process's kernels: its own, or a wheel's.

    It is a wheel's if only a wheel has all code. It never changes: kernels depend on its features, see `simd128`.
    """
    own, shipped = own_target(), baseline()
    if shipped is None or _unusable() or any(is_full(folder / _fingerprint_for(own)) for folder in _folders()):
        return own
    return shipped if any(is_full(folder / _fingerprint_for(shipped)) for folder in _folders()) else own


def baseline() -> Target | None:
    """The target of a wheel, if this processor can run its code and no other target is demanded."""
    system, *_ = own_target()
    machine = system.partition("-")[0]
    if machine not in BASELINES or _config.CPU_NAME or _config.CPU_FEATURES is not None:
        return None
    features = binding.get_host_cpu_features()
    if not all(features.get(name) for name in _BASELINE_FEATURES[machine].split()):
        return None
    return system, *BASELINES[machine]


def fingerprint() -> str:
    """Digest of everything that compiled code depends on."""
    return _fingerprint_for(target())


@functools.cache
def _fingerprint_for(processor: Target) -> str:
    python = (sys.implementation.cache_tag, sys.abiflags)  # Of the minor version: its interfaces are stable.
    compiler = (numba.__version__, llvmlite.__version__, np.__version__)
    options = (
        _config.OPT,
        _config.LOOP_VECTORIZE,
        _config.SLP_VECTORIZE,
        _config.BOUNDSCHECK,
        _config.DEBUGINFO_DEFAULT,
    )
    key = repr((sources_fingerprint(), python, compiler, options, processor))
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def sources_changed() -> bool:
    """Whether sources changed since this process imported the package, as by an upgrade.

    Such a process may have imported files of both versions: it neither loads nor writes compiled code.
    """
    try:
        return sources.source_stamps() != sources.AT_IMPORT
    except OSError:
        return True  # Installed without sources.


@functools.cache
def _unusable() -> str | None:
    """Why this process has no cache at all; decided at its first use."""
    if _config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set"
    if sources_changed():
        return "the package's files cannot be read, or changed since this process started"
    return None


# Folders


def use_only(folder: Path) -> None:
    """Load and write code in this folder only, in this process and those that it forks."""
    _only[:] = [folder]


def entry_folders() -> list[Path]:
    """Folders of valid code in order of preference, whether they exist or not."""
    if _unusable():
        return []
    return [folder / fingerprint() for folder in _folders()]


def _folders() -> list[Path]:
    named = [Path(_config.CACHE_DIR).absolute()] if _config.CACHE_DIR else []
    return _only or [*named, *_users_folder(), INSTALLED, SHIPPED]


def _users_folder() -> list[Path]:
    """The user's folder; none where a user has no home folder, as in some containers."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.expanduser("~/.cache")
    return [Path(cache, "mqproc")] if os.path.isabs(cache) else []


def full_folder() -> Path | None:
    """The first folder that has all code, if any."""
    return next((folder for folder in entry_folders() if is_full(folder)), None)


def is_full(folder: Path) -> bool:
    """Whether a folder has all code, and may be used."""
    return refusal(folder) is None and os.access(folder / _FULL, os.R_OK)


def writable_folder() -> Path | None:
    """The folder to which code is written, if any."""
    return next((folder for folder in _writable() if write_problem(folder) is None), None)


def _writable() -> list[Path]:
    return [folder for folder in entry_folders() if folder.parent != SHIPPED]


def refusal(folder: Path) -> str | None:
    """Why no code is loaded from a folder; None if it may be, or does not exist."""
    for checked in (folder.parent, folder):
        with contextlib.suppress(OSError):
            if reason := _distrust(checked.stat(), checked):
                return f"{checked} is not used for compiled code, as it {reason}"
    return None


def write_problem(folder: Path) -> str | None:
    """Why no code is written to a folder; None if it can be, as far as known."""
    if reason := refusal(folder):
        return reason
    existing = str(folder)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if reason := _foreign(os.stat(existing)):
        return f"{existing} {reason}"
    if not os.path.isdir(existing):
        return f"{existing} is no folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"


def problems() -> list[str]:
    """Why folders are not used, or why compiled code cannot be kept."""
    if reason := _unusable():
        return [reason]
    folders = entry_folders()
    found = [refusal(folder) for folder in folders]
    if full_folder() is None and writable_folder() is None:
        found += [write_problem(folder) for folder in _writable()]
    return list(dict.fromkeys([problem for problem in found if problem] + _write_errors))


def _distrust(found: os.stat_result, path: Path) -> str | None:
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if path.is_relative_to(SHIPPED):
        # The umask decides on a wheel's files: users that can write its sources can write its code.
        writable &= ~os.stat(__file__).st_mode
    if writable:
        return "can be written by other users (chmod go-w)"
    return _foreign(found)


def _foreign(found: os.stat_result) -> str | None:
    return None if found.st_uid in (os.geteuid(), 0) else f"belongs to user {found.st_uid}"


# Files


def mark_full(folder: Path) -> None:
    """Record that a folder has all code. Raises OSError if it cannot be written."""
    _write(folder, _FULL, b"")


def delete_unused(folder: Path) -> None:
    """Delete leftovers of killed writers, and the least recently used other versions."""
    with contextlib.suppress(OSError):
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        versions = [path for path in folder.parent.iterdir() if _FINGERPRINT.fullmatch(path.name) and path != folder]
        versions.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for unused in versions[_VERSIONS_MAX - 1 :]:
            shutil.rmtree(unused, ignore_errors=True)


def mark_used(folder: Path) -> None:
    """Record the use of a version, so that it is deleted later than others."""
    with contextlib.suppress(OSError):
        os.utime(folder)


def write_errors() -> list[str]:
    """Why compiled code of this process was not written."""
    return list(_write_errors)


def copy_code(source: Path, folder: Path) -> None:
    """Copy all code to a folder. Raises OSError if it cannot be written."""
    for path in sorted(source.glob(f"*{_CODE_SUFFIX}")):
        if (code := _read(path)) is not None:
            _write(folder, path.name, code)
    mark_full(folder)


def make_folder(folder: Path) -> None:
    """Create a folder for code that all users may read, whatever the umask."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for made in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            made.mkdir(_FOLDER_MODE)
            made.chmod(_FOLDER_MODE)


def _write(folder: Path, name: str, code: bytes) -> None:
    """Write a file whole: processes that write it at once replace each other's."""
    make_folder(folder)
    fd, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=folder)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, _FILE_MODE)
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, folder / name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _read(path: Path) -> bytes | None:
    """Code of a file; None without a file, or for one that is damaged or not trusted."""
    try:
        with open(path, "rb") as file:
            if _distrust(os.fstat(file.fileno()), path):
                return None
            data = file.read()
    except OSError:
        return None
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _find(name: str) -> bytes | None:
    """Code of a kernel from the first folder that has it."""
    for folder in entry_folders():
        if refusal(folder) is None and (code := _read(folder / name)) is not None:
            return code
    return None


def progress(without: tuple[str, ...] = ()) -> tuple[int, int]:
    """Number of cached kernels, and of all; `without` those whose files begin with these names."""
    known = {name for name in _names if not name.startswith(without)}
    found: set[str] = set()
    for folder in entry_folders():
        with contextlib.suppress(OSError):
            found.update(name.rsplit(".", 2)[0] for name in os.listdir(folder) if name.endswith(_CODE_SUFFIX))
    return len(known & found), len(known)


# Turns of processes that compile


_before_compiling: Callable[[str], None] | None = None
_turns_fd = -1
# Longer than any kernel takes. After that a second compilation does no harm.
_TURN_WAIT_S: Final = 60.0
_TURN_POLL_S: Final = 0.01


def before_compiling(call: Callable[[str], None] | None) -> None:
    """Call a function with the name of a kernel's file before this process compiles it.

    It may raise an error instead, or wait: the cache is searched again afterwards.
    """
    global _before_compiling
    _before_compiling = call


@contextlib.contextmanager
def compiling_allowed() -> Iterator[None]:
    """Compile kernels in this process within the block, whatever `before_compiling` says."""
    call = _before_compiling
    before_compiling(None)
    try:
        yield
    finally:
        before_compiling(call)


def take_turns(folder: Path) -> None:
    """Wait for kernels that another process, which calls this too, is compiling. Raises OSError."""
    global _turns_fd
    make_folder(folder)
    _turns_fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    before_compiling(_begin_turn)


def _begin_turn(name: str) -> None:
    end_s = time.monotonic() + _TURN_WAIT_S
    while not _try_turn(name, fcntl.LOCK_EX | fcntl.LOCK_NB) and time.monotonic() < end_s:
        time.sleep(_TURN_POLL_S)


def _try_turn(name: str, how: int) -> bool:
    """Lock or unlock the byte of a kernel's name."""
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    try:
        fcntl.lockf(_turns_fd, how, 1, place)
    except OSError:
        return False
    return True


class KernelCache(NullCache):
    """numba's interface to the cache for one kernel. numba's compiler lock is held during calls."""

    is_callee: ClassVar = False
    """Whether a kernel, not Python, needs the code that is loaded or compiled now."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._file = inspect.getfile(function)
        place = f"{function.__qualname__}-{function.__code__.co_firstlineno}"
        self._name = f"{os.path.basename(self._file).removesuffix('.py')}.{place}"
        _names.add(self._name)

    @property
    def cache_path(self) -> str | None:
        folder = writable_folder()
        return str(folder) if folder else None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load a compiled kernel; None if it is not cached.

        This does without importing numba's compiler, a third of the loading time; `_unserialized` saves half of the
        rest.
        """
        code = self._find(sig)
        if code is None and _before_compiling is not None:
            _before_compiling(self._file_name(sig))
            code = self._find(sig)
            if code is not None:
                self.end_turn(sig)
        return None if code is None else _rebuilt(pickle.loads(code), target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a compiled kernel if possible; otherwise each process compiles it."""
        folder = writable_folder()
        if folder is None or target() != own_target() or sources_changed() or data.library.has_dynamic_globals:
            return
        try:
            _write(folder, self._file_name(sig, is_callee=self.is_callee), dumps(data._reduce()))
        except OSError as error:
            _write_errors.append(f"{folder} cannot be written: {error.strerror}")

    def end_turn(self, sig: Any) -> None:
        """Let other processes compile the kernel, whether this one has compiled it or not."""
        if _turns_fd >= 0:
            _try_turn(self._file_name(sig), fcntl.LOCK_UN)

    def _find(self, sig: Any) -> bytes | None:
        code = _find(self._file_name(sig))
        return _find(self._file_name(sig, is_callee=True)) if code is None and self.is_callee else code

    def _file_name(self, sig: Any, *, is_callee: bool = False) -> str:
        kind = "callee" if is_callee else ""
        digest = hashlib.sha256(f"{sig!r}{kind}\0".encode() + _source(self._file)).hexdigest()
        return f"{self._name}.{digest[:_NAME_DIGITS]}{_CODE_SUFFIX}"


@functools.cache
def _source(file: str) -> bytes:
    """A kernel's own file: the fingerprint does not cover kernels outside the package."""
    return Path(file).read_bytes()


def _rebuilt(state: Any, target_context: Any) -> Any:
    codegen = target_context.codegen()
    codegen.unserialize_library = functools.partial(_unserialized, codegen)
    try:
        return CompileResult._rebuild(target_context, *state)
    finally:
        del codegen.unserialize_library


def _unserialized(codegen: Any, state: Any) -> Any:
    """Restore a compiled library; its bitcode is parsed only if a caller is compiled.

    numba would parse the bitcode to find function names; only the wrapper's is needed, and it is known.
    """
    name, kind, data = state
    if kind == "bitcode":
        return CalleeLibrary.of_bitcode(codegen, name, data)
    code, bitcode = data
    library = codegen.create_library(name)
    library.enable_object_caching()
    library._set_compiled_object(code)
    library._finalize_final_module()
    library.get_pointer_to_function = codegen._engine.get_function_address
    library._get_module_for_linking = functools.cache(lambda: binding.parse_bitcode(bitcode))
    return library
