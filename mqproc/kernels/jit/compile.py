"""Decorators of all kernels, with the compiler options."""

# mypy: allow-untyped-calls, allow-subclassing-any

from __future__ import annotations

import _thread
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba
from numba import types
from numba.core import sigutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from mqproc.kernels.jit.cache import KernelCache
from mqproc.kernels.jit.library import CalleeLibrary, KernelLibrary

F = TypeVar("F", bound=Callable[..., Any])

# The parts of numba used here exceed its type stubs.
_numba: Any = numba

COMPILED = not _numba.config.DISABLE_JIT
"""False under NUMBA_DISABLE_JIT=1: kernels then are plain functions."""


_WAIT_S: Final = 0.2
"""Longest wait for a lock. A signal that arrives just before a wait is handled after it."""


class _KernelDispatcher(CPUDispatcher):
    """Compiles a kernel for the types of its arguments, and calls it.

    A kernel that only kernels call is compiled as a callee: without a wrapper for Python and without machine code,
    since each caller contains its code. That saves a sixth of the compile time. A call from Python compiles it again.
    """

    _cache: Any

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Type a call by a kernel. Constants become int64: each would be compiled for itself."""
        args = tuple(types.unliteral(arg) for arg in args)
        kws = {name: types.unliteral(arg) for name, arg in kws.items()}
        outer, KernelCache.is_callee = KernelCache.is_callee, True
        try:
            return super().get_call_template(args, kws)
        finally:
            KernelCache.is_callee = outer

    def compile(self, sig: Any) -> Any:
        """Compile for a signature, or load from the cache."""
        with global_compiler_lock:  # Other code is compiled as usual.
            args = tuple(sigutils.normalize_signature(sig)[0])
            if not KernelCache.is_callee and args in self.overloads and _is_callee(self.overloads[args]):
                del self.overloads[args]
            context: Any = self.targetctx
            codegen = context.codegen()
            outer = codegen._library_class
            codegen._library_class = CalleeLibrary if KernelCache.is_callee else KernelLibrary
            try:
                return super().compile(sig)
            finally:
                codegen._library_class = outer
                if isinstance(self._cache, KernelCache):
                    self._cache.end_turn(sig)

    def add_overload(self, cres: Any) -> None:
        """Add compiled code; calls from Python do not find that of a callee."""
        if _is_callee(cres):
            self.overloads[tuple(cres.signature.args)] = cres
        else:
            super().add_overload(cres)


def _is_callee(cres: Any) -> bool:
    return isinstance(cres.library, CalleeLibrary)


def _without_wrapper_of_callees(flags: Any) -> Any:
    flags.no_cpython_wrapper = KernelCache.is_callee
    return flags


def uninterrupted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Delay exceptions of signal handlers until a function has ended.

    A handler, as for Ctrl-C, may raise an exception at any step of the main thread. numba and llvmlite, stopped
    halfway, free memory twice, call code that is not loaded yet, or never release a lock. So the function runs in
    another thread. Python's threads and conditions do not survive such an exception either: this uses the primitives
    below them.
    """

    def run(*args: Any) -> Any:
        if threading.get_ident() != threading.main_thread().ident:
            return function(*args)
        running = threading.Lock()
        ended: list[Any] = []
        raised: list[BaseException] = []

        def work() -> None:
            result = None
            try:
                result = function(*args)
            except BaseException as error:
                raised.append(error)
            ended.append(result)
            running.release()

        running.acquire()
        try:
            _thread.start_new_thread(work, ())
        except RuntimeError:  # No thread can be created, as at the program's end.
            return function(*args)
        while not ended:
            try:
                running.acquire(timeout=_WAIT_S)
            except BaseException as error:
                raised.append(error)
        if raised:
            raise raised[-1]
        return ended[0]

    return run


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
    # No wrappers for callers in C: an eighth of the compile time.
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False, "no_cfunc_wrapper": True}
    dispatcher: Any = _KernelDispatcher(function, {}, {"nopython": True, "forceinline": forceinline, **options})
    dispatcher._compiler._customize_flags = _without_wrapper_of_callees
    # Only code that its file determines is cached: none of an interpreter's prompt, no closures.
    if function.__closure__ is None and os.path.exists(inspect.getfile(function)):
        dispatcher._cache = KernelCache(function)
    for name in ("typeof_pyval", "_compile_for_args"):  # numba's entry points for arguments of new types.
        setattr(dispatcher, name, uninterrupted(getattr(dispatcher, name)))
    return cast(F, dispatcher)


def plain(function: F) -> F:
    """The uncompiled function of a kernel; the function itself if nothing is compiled."""
    return cast(F, getattr(function, "py_func", function))
