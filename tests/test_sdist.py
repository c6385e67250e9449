"""MANIFEST.in: the source distribution contains READMEs, dashboards, rules and tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
