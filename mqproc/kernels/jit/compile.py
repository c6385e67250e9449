"""The one decorator of all kernels, with their compiler options in one place.

Compiled code is cached beside the sources. numba keeps an entry while the kernel's own file is unchanged, but a kernel
also contains the code of every kernel it calls, the primitives, and the offsets of `mqproc.layout` as constants, which
follow from what that imports: a counter for each error moves all words behind it. So the stamp of an entry also has a
fingerprint of both folders and of those modules: a change in any of their files compiles again.

The file with the code has the fingerprint in its name. numba writes what an entry's code is made of before the code,
into files that it numbers anew when sources change: one that was killed in between would leave the last sources' code
to be taken for that of these, for good, and counters would be kept where other words are now.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numba
from llvmlite import binding
from numba import types

from mqproc.util.version import IMPORTED_NS

F = TypeVar("F", bound=Callable[..., Any])

# What is used of numba goes beyond its type stubs.
_numba: Any = numba

COMPILED = not _numba.config.DISABLE_JIT
"""False under NUMBA_DISABLE_JIT=1: kernels are then the plain functions they were written as."""

_FROZEN_FOLDERS = ("kernels", "layout")
FROZEN_MODULES = ("errors.py", "topic_names.py", "types.py", "util/compression.py", "util/units.py", "util/version.py")
"""What the files of these folders import of the package beside each other, directly or not."""

CODE_SUFFIX = ".nbc"
_PACKAGE = Path(__file__).parents[2]
_NAMED_DIGITS = 16
# The kernel's clock for files goes by ticks.
_TICK_NS = 20_000_000


@functools.cache
def sources_fingerprint(package: Path = _PACKAGE) -> str:
    """SHA-256 of all sources that compiled code may have frozen into it."""
    digest = hashlib.sha256()
    for path in _frozen_sources(package):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def sources_changed(since_ns: int, package: Path = _PACKAGE) -> bool:
    """Whether these sources may have been changed after `since_ns` (Unix time), as when a package is upgraded.

    A process that has imported some of them before and others afterwards is of neither version: what it compiles is for
    itself.
    """
    changed_ns = max(path.stat().st_ctime_ns for path in _frozen_sources(package))
    return changed_ns + _TICK_NS > since_ns


def _frozen_sources(package: Path) -> list[Path]:
    paths = [path for folder in _FROZEN_FOLDERS for path in sorted((package / folder).rglob("*.py"))]
    return [*paths, *(package / name for name in FROZEN_MODULES)]


def _without_literals(get_call_template: Callable[..., Any]) -> Callable[..., Any]:
    """Let a constant argument be an int64 as any other: numba would compile a called kernel again for each constant."""

    def resolve(args: tuple[types.Type, ...], kws: dict[str, types.Type]) -> Any:
        return get_call_template(
            tuple(types.unliteral(arg) for arg in args), {name: types.unliteral(arg) for name, arg in kws.items()}
        )

    return resolve


def _load_compiled(cache: Any, signature: Any, target_context: Any) -> Any:
    """What numba does, without first importing all that it knows of types: only its compiler needs that, and gets it.

    It is a third of the time that loading every kernel takes, at each start of a group. Half of the rest is spared by
    `_unserialized`. numba's lock for compiling is held.
    """
    codegen = target_context.codegen()
    codegen.unserialize_library = functools.partial(_unserialized, codegen)
    try:
        with cache._guard_against_spurious_io_errors():
            return cache._load_overload(signature, target_context)
    finally:
        del codegen.unserialize_library


def _unserialized(codegen: Any, state: Any) -> Any:
    """What numba does, but the bitcode is parsed when a kernel is compiled that calls this one: mostly never.

    numba finds the names of its functions in it, and asks for that of the wrapper alone, which is there.
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
    """Compile a function at its first call: no GIL, C arithmetic, no bounds checks, cached on disk.

    A kernel allocates nothing, so numba's reference counting is off: it would cost 7 ns each time a kernel calls
    another with an array.
    """
    return _compiled(function, forceinline=False)


def inlined(function: F) -> F:
    """A kernel that stands in its callers wherever it is called: for steps of a loop over messages.

    A call hands every array over as seven words in memory, which costs more than such a step does; left to itself the
    compiler decides by size, and a line more elsewhere turns it round.
    """
    return _compiled(function, forceinline=True)


def _compiled(function: F, *, forceinline: bool) -> F:
    if not COMPILED:
        return function
    dispatcher = _numba.njit(
        function, nogil=True, error_model="numpy", boundscheck=False, _nrt=False, forceinline=forceinline
    )
    if not sources_changed(IMPORTED_NS):
        with contextlib.suppress(RuntimeError):  # No folder can be written to: each process compiles for itself.
            _cache_by_fingerprint(dispatcher)
    dispatcher.get_call_template = _without_literals(dispatcher.get_call_template)
    return cast(F, dispatcher)


def _cache_by_fingerprint(dispatcher: Any) -> None:
    """numba has no public way for most of this; tests show that it is honoured."""
    dispatcher.enable_caching()
    dispatcher._cache.load_overload = functools.partial(_load_compiled, dispatcher._cache)
    files = dispatcher._cache._cache_file
    files._source_stamp = (files._source_stamp, sources_fingerprint())
    files._data_name_pattern = files._data_name_pattern.removesuffix(CODE_SUFFIX) + code_ending()


def code_ending() -> str:
    """How the names of files end that have code compiled from these sources."""
    return f".{sources_fingerprint()[:_NAMED_DIGITS]}{CODE_SUFFIX}"


def variant(function: F, **others: Callable[..., Any]) -> F:
    """A kernel as it would be if it called `others` by the names of some of its own, for this process alone.

    A benchmark takes parts out of a kernel so, to see what they cost.
    """
    source = plain(function)
    changed = FunctionType(source.__code__, source.__globals__ | others, source.__name__)
    if not COMPILED:
        return cast(F, changed)
    # Not cached: by name and file it would be taken for the kernel itself.
    return cast(F, _numba.njit(changed, nogil=True, error_model="numpy", boundscheck=False, _nrt=False))


def plain(function: F) -> F:
    """The uncompiled function behind a kernel (the function itself when nothing is compiled)."""
    return cast(F, getattr(function, "py_func", function))
