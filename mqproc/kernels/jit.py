"""The one decorator of all kernels, with their compiler options in one place.

Compiled code is cached beside the sources. numba keeps an entry while the kernel's own file is unchanged, but a kernel
also contains the code of every kernel it calls, the primitives, and the offsets of `mqproc.layout` as constants, which
follow from what that imports: a counter for each error moves all words behind it. So the stamp of an entry also has a
fingerprint of both folders and of those modules: a change in any of their files compiles again.
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
from numba import types

F = TypeVar("F", bound=Callable[..., Any])

# What is used of numba goes beyond its type stubs.
_numba: Any = numba

COMPILED = not _numba.config.DISABLE_JIT
"""False under NUMBA_DISABLE_JIT=1: kernels are then the plain functions they were written as."""

_FROZEN_FOLDERS = ("kernels", "layout")
FROZEN_MODULES = ("delay_levels.py", "errors.py", "message.py", "names.py")
"""What the files of these folders import of the package beside each other, directly or not."""


@functools.cache
def sources_fingerprint(package: Path = Path(__file__).parent.parent) -> str:
    """SHA-256 of all sources that compiled code may have frozen into it."""
    digest = hashlib.sha256()
    paths = [path for folder in _FROZEN_FOLDERS for path in sorted((package / folder).glob("*.py"))]
    for path in (*paths, *(package / name for name in FROZEN_MODULES)):
        digest.update(f"{path.relative_to(package)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _without_literals(get_call_template: Callable[..., Any]) -> Callable[..., Any]:
    """Let a constant argument be an int64 as any other: numba would compile a called kernel again for each constant."""

    def resolve(args: tuple[types.Type, ...], kws: dict[str, types.Type]) -> Any:
        return get_call_template(
            tuple(types.unliteral(arg) for arg in args), {name: types.unliteral(arg) for name, arg in kws.items()}
        )

    return resolve


def _load_compiled(cache: Any, signature: Any, target_context: Any) -> Any:
    """What numba does, without first importing all that it knows of types: only its compiler needs that, and gets it.

    It is a third of the time that loading every kernel takes, at each start of a group.
    """
    with cache._guard_against_spurious_io_errors():
        return cache._load_overload(signature, target_context)


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
    with contextlib.suppress(RuntimeError):  # No folder can be written to: each process compiles for itself.
        dispatcher.enable_caching()
        # numba has no public way for what follows; tests show that it is honoured.
        dispatcher._cache.load_overload = functools.partial(_load_compiled, dispatcher._cache)
        files = dispatcher._cache._cache_file
        files._source_stamp = (files._source_stamp, sources_fingerprint())
    dispatcher.get_call_template = _without_literals(dispatcher.get_call_template)
    return cast(F, dispatcher)


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
