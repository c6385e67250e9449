"""Platform tag of the wheel; all else is in pyproject.toml.

mqproc has no compiled code of its own, but it works only on Linux, and numba has wheels for these two processors. On
another system a wheel made of the sdist has that system's tag, so that pip installs it and the import explains what to
do.
"""

from __future__ import annotations

import re
import sys
import sysconfig

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

LINUX_TAGS = "manylinux_2_17_aarch64.manylinux_2_17_x86_64"


class PlatformWheel(bdist_wheel):
    """A wheel of Python code for one operating system."""

    def get_tag(self) -> tuple[str, str, str]:
        own_tag = re.sub("[-.]", "_", sysconfig.get_platform())
        return "py3", "none", LINUX_TAGS if sys.platform == "linux" else own_tag


setup(cmdclass={"bdist_wheel": PlatformWheel})
