"""Compilation of kernels: decorators, primitives with LLVM bodies, and warming of the cache."""
