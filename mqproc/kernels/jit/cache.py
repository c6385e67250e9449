"""The cache of compiled kernels on disk: where it is, and which of its code is valid.

    <folder>/<fingerprint>/<module>.<function>-<line>.<digest>.nbc   code for one signature, after its SHA-256
    <folder>/<fingerprint>/full                                      every kernel is there
    <folder>/<fingerprint>/lock                                      locked by the process that fills it

The fingerprint covers the sources of all kernels, the versions of Python, numba, llvmlite and numpy, the processor, and
numba's compiler options. It alone decides whether code is valid; file times and bytecode do not.

Code is loaded from the first of these folders that has it, and written to the first that is writable:

    NUMBA_CACHE_DIR             if set
    ~/.cache/mqproc             one for all environments of a user; below XDG_CACHE_HOME if set
    the installation's own      in `kernels/__pycache__`; root's `mqproc warm` fills it for all users

Compiled code can do anything. So folders and files must belong to this user or root, and other users must not be able
to write them.
"""

# mypy: allow-untyped-calls, allow-subclassing-any

from __future__ import annotations

import contextlib
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from mqproc.util import sources

# The parts of numba used here exceed its type stubs.
_config: Any = numba.config

INSTALLED: Final = Path(sources.PACKAGE, "kernels", "__pycache__", "compiled")
"""The installation's own folder."""

LOCK: Final = "lock"
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


# Validity


@functools.cache
def sources_fingerprint(package: str = sources.PACKAGE) -> str:
    """SHA-256 of all sources that compiled code may depend on."""
    digest = hashlib.sha256()
    for name in sources.kernel_sources(package):
        digest.update(f"{name}\0".encode() + Path(package, name).read_bytes())
    return digest.hexdigest()


@functools.cache
def fingerprint() -> str:
    """Digest of everything that compiled code depends on."""
    python = (sys.implementation.cache_tag, sys.abiflags)  # Of the minor version: its interfaces are stable.
    compiler = (numba.__version__, llvmlite.__version__, np.__version__)
    options = (
        _config.OPT,
        _config.LOOP_VECTORIZE,
        _config.SLP_VECTORIZE,
        _config.BOUNDSCHECK,
        _config.DEBUGINFO_DEFAULT,
    )
    processor = cpu_target.target_context.codegen().magic_tuple()
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
    named = [Path(_config.CACHE_DIR).absolute()] if _config.CACHE_DIR else []
    return [folder / fingerprint() for folder in _only or [*named, *_users_folder(), INSTALLED]]


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
    return next((folder for folder in entry_folders() if write_problem(folder) is None), None)


def refusal(folder: Path) -> str | None:
    """Why no code is loaded from a folder; None if it may be, or does not exist."""
    for checked in (folder.parent, folder):
        with contextlib.suppress(OSError):
            if reason := _distrust(checked.stat()):
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
        found += [write_problem(folder) for folder in folders]
    return list(dict.fromkeys([problem for problem in found if problem] + _write_errors))


def _distrust(found: os.stat_result) -> str | None:
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
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
            if _distrust(os.fstat(file.fileno())):
                return None
            data = file.read()
    except OSError:
        return None
    digest, code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


class KernelCache(NullCache):
    """numba's interface to the cache for one kernel. numba's compiler lock is held during calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._file = inspect.getfile(function)
        place = f"{function.__qualname__}-{function.__code__.co_firstlineno}"
        self._name = f"{os.path.basename(self._file).removesuffix('.py')}.{place}"

    @property
    def cache_path(self) -> str | None:
        folder = writable_folder()
        return str(folder) if folder else None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load a compiled kernel; None if it is not cached.

        This does without importing numba's compiler, a third of the loading time; `_unserialized` saves half of the
        rest.
        """
        name = self._file_name(sig)
        for folder in entry_folders():
            if refusal(folder) is None and (code := _read(folder / name)) is not None:
                return _rebuilt(pickle.loads(code), target_context)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a compiled kernel if possible; otherwise each process compiles it."""
        folder = writable_folder()
        if folder is None or sources_changed() or data.library.has_dynamic_globals:
            return
        try:
            _write(folder, self._file_name(sig), dumps(data._reduce()))
        except OSError as error:
            _write_errors.append(f"{folder} cannot be written: {error.strerror}")

    def _file_name(self, sig: Any) -> str:
        digest = hashlib.sha256(f"{sig!r}\0".encode() + _source(self._file)).hexdigest()
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
    if kind != "object":
        return type(codegen)._library_class._unserialize(codegen, state)
    code, bitcode = data
    library = codegen.create_library(name)
    library.enable_object_caching()
    library._set_compiled_object(code)
    library._finalize_final_module()
    library.get_pointer_to_function = codegen._engine.get_function_address
    library._get_module_for_linking = functools.cache(lambda: binding.parse_bitcode(bitcode))
    return library
