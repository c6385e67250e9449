"""setuptools, plus what a wheel needs to compile the kernels that it ships (setup.py)."""

from __future__ import annotations

from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

KERNELS_NEED = ["numba>=0.68,<0.69", "numpy>=2.0", "msgspec>=0.19"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Not for an editable installation or an sdist, which ship nothing compiled."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *KERNELS_NEED]
