"""Platform tag of the wheel, and its compiled kernels; all else is in pyproject.toml.

mqproc works only on Linux, and numba has wheels for these two processors. On another system a wheel made of the sdist
has that system's tag, so that pip installs it and the import explains what to do.

A wheel ships its kernels as numba has compiled them here, for a baseline processor. They are used where Python, numba
and processor match; elsewhere the first start compiles. MQPROC_BUILD_KERNELS=0 in the environment leaves them out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

LINUX_TAGS = "manylinux_2_17_aarch64.manylinux_2_17_x86_64"
BASELINE = """
from mqproc.kernels.jit import cache
print(*(cache.baseline() or ())[1:])
"""
COMPILE = """
import shutil, sys
from pathlib import Path
from mqproc.kernels.jit import cache
cache.use_only(Path(sys.argv[1]))
from mqproc.kernels.modules import LATER, SERVING
for module in (*SERVING, *LATER):
    module.warm()
(folder,) = cache.entry_folders()
shutil.rmtree(cache.SHIPPED, ignore_errors=True)
cache.copy_code(folder, cache.SHIPPED / folder.name)
"""


class PlatformWheel(bdist_wheel):
    """A wheel of Python code for one operating system."""

    def get_tag(self) -> tuple[str, str, str]:
        own_tag = re.sub("[-.]", "_", sysconfig.get_platform())
        return "py3", "none", LINUX_TAGS if sys.platform == "linux" else own_tag


class BuildWithKernels(build_py):
    """Modules, and next to the kernels' sources their compiled code, except in an editable installation."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode and os.environ.get("MQPROC_BUILD_KERNELS") != "0":
            self.compile_kernels()

    def compile_kernels(self) -> None:
        """Compile all kernels; where that is not possible the wheel has none."""
        path = [os.path.abspath(self.build_lib), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        try:
            # -P: the modules that were copied, not those of the current folder.
            found = subprocess.check_output([sys.executable, "-P", "-c", BASELINE], env=environment, text=True).split()
            if not found:
                raise ValueError("not on this processor")
            environment |= dict(zip(("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"), [*found, ""], strict=False))
            with tempfile.TemporaryDirectory() as folder:
                print("compiling kernels for the wheel, which takes a minute")
                subprocess.check_call([sys.executable, "-P", "-c", COMPILE, folder], env=environment)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            print(f"the wheel has no compiled kernels: {error}")


setup(cmdclass={"bdist_wheel": PlatformWheel, "build_py": BuildWithKernels})
