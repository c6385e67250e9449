"""Decorators of all kernels, with the compiler options and the on-disk cache.

numba caches compiled code beside the sources and invalidates an entry when the kernel's own file changes. But a kernel
also contains the code of the kernels it calls, the primitives, and offsets of `mqproc.layout` as constants, which
depend on the modules that these import: one more error code moves the words after its counter. The stamp of a cache
entry therefore includes a fingerprint of all these files.

The code file has the fingerprint in its name. numba writes the index of an entry before the code, into files that it
numbers from 1 again when sources change. A process killed in between would leave an index that points to the code of
the previous sources.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import binding
from numba import types

from mqproc.util.version import IMPORTED_NS

F = TypeVar("F", bound=Callable[..., Any])

# The parts of numba used here exceed its type stubs.
_numba: Any = numba

COMPILED = not _numba.config.DISABLE_JIT
"""False under NUMBA_DISABLE_JIT=1: kernels then are plain functions."""

_FROZEN_FOLDERS = ("kernels", "layout")
FROZEN_MODULES = ("errors.py", "topic_names.py", "types.py", "util/compression.py", "util/units.py", "util/version.py")
"""Modules of the package outside these folders that their files import, directly or indirectly."""

CODE_SUFFIX = ".nbc"
_PACKAGE = Path(__file__).parents[2]
_NAMED_DIGITS = 16
# File timestamps advance in ticks of the kernel's clock.
_TICK_NS = 20_000_000


@functools.cache
def sources_fingerprint(package: Path = _PACKAGE) -> str:
    """SHA-256 of all sources that compiled code may depend on."""
    digest = hashlib.sha256()
    for path in _frozen_sources(package):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def sources_changed(since_ns: int, package: Path = _PACKAGE) -> bool:
    """Whether sources may have changed after `since_ns` (Unix time), as by a package upgrade.

    A process that imported some files before a change and others after it matches neither version; it must not write to
    the cache.
    """
    changed_ns = max(path.stat().st_ctime_ns for path in _frozen_sources(package))
    return changed_ns + _TICK_NS > since_ns


def _frozen_sources(package: Path) -> list[Path]:
    paths = [path for folder in _FROZEN_FOLDERS for path in sorted((package / folder).rglob("*.py"))]
    return [*paths, *(package / name for name in FROZEN_MODULES)]


def _without_literals(get_call_template: Callable[..., Any]) -> Callable[..., Any]:
    """Type constant arguments as int64: numba would compile a callee for each constant."""

    def resolve(args: tuple[types.Type, ...], kws: dict[str, types.Type]) -> Any:
        return get_call_template(
            tuple(types.unliteral(arg) for arg in args), {name: types.unliteral(arg) for name, arg in kws.items()}
        )

    return resolve


def _load_compiled(cache: Any, signature: Any, target_context: Any) -> Any:
    """Load a cached kernel without importing numba's compiler, a third of the loading time.

    The compiler does these imports itself. `_unserialized` saves half of the remaining time. numba's compiler lock
    is held.
    """
    codegen = target_context.codegen()
    codegen.unserialize_library = functools.partial(_unserialized, codegen)
    try:
        with cache._guard_against_spurious_io_errors():
            return cache._load_overload(signature, target_context)
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


def kernel(function: F) -> F:
    """Compile a function at its first call.

    No GIL, C arithmetic, no bounds checks, cached on disk. Kernels allocate nothing, so numba's reference counting is
    off; it would cost 7 ns for each call with an array.
    """
    return _compiled(function, forceinline=False)


def inlined(function: F) -> F:
    """A kernel that is inlined into its callers, for the steps of a loop over messages.

    A call passes each array as seven words in memory, which costs more than such a step. The compiler's own decision
    depends on size and may change with any edit.
    """
    return _compiled(function, forceinline=True)


def _compiled(function: F, *, forceinline: bool) -> F:
    if not COMPILED:
        return function
    dispatcher = _numba.njit(
        function, nogil=True, error_model="numpy", boundscheck=False, _nrt=False, forceinline=forceinline
    )
    if not sources_changed(IMPORTED_NS):
        with contextlib.suppress(RuntimeError):  # No writable folder: each process compiles in memory.
            _cache_by_fingerprint(dispatcher)
    dispatcher.get_call_template = _without_literals(dispatcher.get_call_template)
    return cast(F, dispatcher)


def _cache_by_fingerprint(dispatcher: Any) -> None:
    """Add the fingerprint to the cache entries, with numba internals that tests check."""
    dispatcher.enable_caching()
    dispatcher._cache.load_overload = functools.partial(_load_compiled, dispatcher._cache)
    files = dispatcher._cache._cache_file
    files._source_stamp = (files._source_stamp, sources_fingerprint())
    files._data_name_pattern = files._data_name_pattern.removesuffix(CODE_SUFFIX) + code_ending()


def code_ending() -> str:
    """File name suffix of code compiled from these sources."""
    return f".{sources_fingerprint()[:_NAMED_DIGITS]}{CODE_SUFFIX}"


def plain(function: F) -> F:
    """The uncompiled function of a kernel; the function itself if nothing is compiled."""
    return cast(F, getattr(function, "py_func", function))
