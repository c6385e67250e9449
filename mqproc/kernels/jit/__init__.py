"""Compilation of kernels: decorators, and primitives with LLVM bodies."""
