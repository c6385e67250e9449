"""Source distribution: READMEs, dashboards, rules and tests. Wheel: for Linux only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from packaging import tags
from packaging.utils import parse_wheel_filename

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
from setuptools import build_meta
from setuptools.command import bdist_wheel
sys.platform = sys.argv[2]
print(build_meta.build_wheel(sys.argv[1]))
"""


def tags_of_wheel(folder: Path, platform: str) -> frozenset[tags.Tag]:
    """Build a wheel of a copy of the project, as on this platform, and return its tags."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "mqproc", source / "mqproc", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD, str(folder), platform],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    name = done.stdout.splitlines()[-1]
    assert (folder / name).is_file()
    return parse_wheel_filename(name)[3]


def test_wheel_installs_on_linux_only(tmp_path: Path) -> None:
    found = tags_of_wheel(tmp_path, "linux")
    assert found & set(tags.sys_tags()), "pip on this machine"
    for processor in ("x86_64", "aarch64"):
        platforms = [f"manylinux_2_{minor}_{processor}" for minor in (17, 39)]
        assert found & set(tags.compatible_tags((3, 13), platforms=platforms))
    others = [*tags.mac_platforms((26, 0), "arm64"), "win_amd64"]
    assert not found & set(tags.compatible_tags((3, 13), platforms=others))


def test_wheel_of_sdist_on_another_system_is_not_for_any(tmp_path: Path) -> None:
    """There it can be installed, and its import explains what to do."""
    assert {tag.platform for tag in tags_of_wheel(tmp_path, "darwin")} != {"any"}
