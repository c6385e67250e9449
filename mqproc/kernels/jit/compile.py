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
from numba.core.codegen import JITCodeLibrary
from numba.core.registry import cpu_target

from mqproc.kernels.jit.cache import KernelCache

F = TypeVar("F", bound=Callable[..., Any])

# The parts of numba used here exceed its type stubs.
_numba: Any = numba

COMPILED = not _numba.config.DISABLE_JIT
"""False under NUMBA_DISABLE_JIT=1: kernels then are plain functions."""


_WAIT_S: Final = 0.2
"""Longest wait for a lock: Python sees a signal that arrives just before the wait only after it."""


class _OptimizedOnce(JITCodeLibrary):
    """A library that LLVM optimizes once, when its callees are linked into it.

    numba optimizes each function before, and then all of them twice, in order to remove reference counts. Kernels have
    none, and it takes a tenth of their compile time.
    """

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


def _optimized_once(compile_kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with `_OptimizedOnce`; numba's lock is held, so other code is compiled as usual."""

    def run(*args: Any) -> Any:
        codegen = cpu_target.target_context.codegen()
        usual = codegen._library_class  # A caller's, while its callees are compiled.
        codegen._library_class = _OptimizedOnce
        try:
            return compile_kernel(*args)
        finally:
            codegen._library_class = usual

    return run


def _without_literals(get_call_template: Callable[..., Any]) -> Callable[..., Any]:
    """Type constant arguments as int64: numba would compile a callee for each constant."""

    def resolve(args: tuple[types.Type, ...], kws: dict[str, types.Type]) -> Any:
        return get_call_template(
            tuple(types.unliteral(arg) for arg in args), {name: types.unliteral(arg) for name, arg in kws.items()}
        )

    return resolve


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
    dispatcher = _numba.njit(function, forceinline=forceinline, **options)
    # Only code that its file determines is cached: none of an interpreter's prompt, no closures.
    if function.__closure__ is None and os.path.exists(inspect.getfile(function)):
        dispatcher._cache = KernelCache(function)
    for name in ("typeof_pyval", "_compile_for_args"):  # numba's entry points for arguments of new types.
        setattr(dispatcher, name, uninterrupted(getattr(dispatcher, name)))
    compiler = dispatcher._compiler
    compiler.compile = _optimized_once(compiler.compile)
    dispatcher.get_call_template = _without_literals(dispatcher.get_call_template)
    return cast(F, dispatcher)


def plain(function: F) -> F:
    """The uncompiled function of a kernel; the function itself if nothing is compiled."""
    return cast(F, getattr(function, "py_func", function))
