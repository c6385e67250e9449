"""Compiled code of a kernel: optimized once, without machine code if only kernels call it."""

# mypy: allow-untyped-calls, allow-subclassing-any

from __future__ import annotations

from typing import Any

from llvmlite import binding
from numba.core.codegen import JITCodeLibrary


class KernelLibrary(JITCodeLibrary):
    """Code that LLVM optimizes once, when the callees are linked into it.

    numba also optimizes each function before linking, and the linked code twice, to remove reference counts. Kernels
    count no references, and these passes take a tenth of the compile time.
    """

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class CalleeLibrary(KernelLibrary):
    """LLVM code to be linked into the kernels that call it. It has no machine code."""

    _bitcode: bytes | None = None

    @classmethod
    def of_bitcode(cls, codegen: Any, name: str, bitcode: bytes) -> CalleeLibrary:
        """Restore a library."""
        library = cls(codegen, name)
        library._bitcode, library._finalized = bitcode, True
        return library

    def _get_module_for_linking(self) -> Any:
        if self._bitcode is not None and self._shared_module is None:
            self._shared_module = binding.parse_bitcode(self._bitcode)
        return super()._get_module_for_linking()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def serialize_using_object_code(self) -> tuple[str, str, bytes]:
        return self.name, "bitcode", self._get_module_for_linking().as_bitcode()

    @property
    def codegen(self) -> _NoEnvironments:
        return _NoEnvironments()


class _NoEnvironments:
    """Takes the place of numba's code generator, which stores Python objects in machine code."""

    def set_env(self, env_name: str, env: Any) -> None:
        pass
