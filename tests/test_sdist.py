"""Source distribution: READMEs, dashboards, rules and tests. Wheel: for Linux only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging import tags
from packaging.utils import parse_wheel_filename

from mqproc.kernels.jit import cache

ROOT = Path(__file__).parent.parent
PROGRAM = """
from setuptools.command.egg_info import FileList
files = FileList()
for line in open("MANIFEST.in"):
    files.process_template_line(line.strip())
print("\\n".join(files.files))
"""


def test_sdist_has_readmes_dashboards_rules_and_tests() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    names = set(result.stdout.splitlines())
    readmes = [path for folder in ("mqproc", "supervisor") for path in (ROOT / folder).rglob("README.md")]
    wanted = [*readmes, *(ROOT / "grafana").rglob("*"), *(ROOT / "tests").rglob("*.py"), ROOT / "CHANGELOG.md"]
    assert {str(path.relative_to(ROOT)) for path in wanted if path.is_file() and path.suffix != ".pyc"} <= names
    assert "mqproc/supervisor/README.md" in names
    assert not any(name.endswith(".pyc") for name in names)


BUILD = """
import sys
sys.path.insert(0, ".")
import build_backend
from setuptools.command import bdist_wheel
sys.platform = sys.argv[2]
print(build_backend.build_wheel(sys.argv[1]))
"""


def built_wheel(folder: Path, platform: str, *, kernels: str = "0", timeout_s: int = 120) -> Path:
    """Build a wheel of a copy of the project, as on this platform."""
    source = folder / "source"
    source.mkdir()
    for name in ("build_backend.py", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "mqproc", source / "mqproc", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, str(folder), platform],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env=os.environ | {"MQPROC_BUILD_KERNELS": kernels},
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def tags_of_wheel(folder: Path, platform: str) -> frozenset[tags.Tag]:
    wheel = built_wheel(folder, platform)
    assert wheel.is_file()
    return parse_wheel_filename(wheel.name)[3]


def test_wheel_installs_on_linux_only(tmp_path: Path) -> None:
    found = tags_of_wheel(tmp_path, "linux")
    assert found & set(tags.sys_tags()), "pip on this machine"
    for processor in ("x86_64", "aarch64"):
        platforms = [f"manylinux_2_{minor}_{processor}" for minor in (17, 39)]
        assert found & set(tags.compatible_tags((3, 13), platforms=platforms))
    others = [*tags.mac_platforms((26, 0), "arm64"), "win_amd64"]
    assert not found & set(tags.compatible_tags((3, 13), platforms=others))


@pytest.mark.slow
@pytest.mark.skipif(cache.baseline() is None, reason="no wheel is compiled for this processor")
def test_wheel_ships_compiled_kernels(tmp_path: Path) -> None:
    wheel = built_wheel(tmp_path, sys.platform, kernels="1", timeout_s=290)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    program = "from mqproc.kernels.jit import cache; print(cache.full_folder())"
    environment = {"PYTHONPATH": str(tmp_path / "installed"), "HOME": str(tmp_path)}
    found = subprocess.check_output([sys.executable, "-P", "-c", program], env=environment, text=True, timeout=60)
    assert found.startswith(str(tmp_path / "installed" / "mqproc" / "kernels" / "compiled"))


def test_wheel_of_sdist_on_another_system_is_not_for_any(tmp_path: Path) -> None:
    """There it can be installed, and its import explains what to do."""
    assert {tag.platform for tag in tags_of_wheel(tmp_path, "darwin")} != {"any"}
