"""`mqproc guide` and `mqproc examples` list and show guides and examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mqproc.cli.admin.guides import all_examples
from tests.support.command_line import PseudoTerminal, call

GUIDES = Path(__file__).parents[3] / "mqproc" / "guides"


def test_guide_without_name_lists_all() -> None:
    lines = call("guide").out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == sorted(path.stem for path in GUIDES.glob("*.md"))
    rows = call("guide", "--json").json["guides"]
    for row in rows:
        first = (GUIDES / f"{row['name']}.md").read_text().splitlines()[0]
        assert row["title"] == first.lstrip("# ")


def test_guide_into_pipe_is_plain_markdown() -> None:
    for path in GUIDES.glob("*.md"):
        assert call("guide", path.stem).out.rstrip("\n") == path.read_text().rstrip("\n")


def test_guide_on_terminal_is_formatted() -> None:
    with PseudoTerminal("guide", "concepts", columns=100, lines=50) as terminal:
        assert terminal.end() == 0
        assert "## " not in terminal.text()
        assert "Glossary" in terminal.raw.decode()


def test_unknown_guide_lists_names() -> None:
    outcome = call("guide", "kafka")
    assert (outcome.code, outcome.out) == (2, "")
    names = ", ".join(sorted(path.stem for path in GUIDES.glob("*.md")))
    assert f"there is no guide 'kafka'; there are: {names};" in outcome.err


# Examples


ROOT = Path(__file__).parents[3]


def test_examples_are_those_of_readme_and_guides() -> None:
    texts = [(ROOT / "README.md").read_text(), *map(Path.read_text, sorted((ROOT / "mqproc/guides").glob("*.md")))]
    found = all_examples()
    for example in found:
        assert any(f"```{example.language}\n{example.code}```" in text for text in texts)
    assert len(found) >= sum(text.count("```python\n") for text in texts)


def test_examples_without_word_lists_all() -> None:
    lines = call("examples").out.splitlines()
    assert lines[0].split() == ["examples", "of", "sh", "python"]
    assert len(lines) == 1 + len({example.title for example in all_examples()})
    assert re.fullmatch(r"Start +\d+ +\d+", lines[1])
    found = call("examples", "--json").json["examples"]
    assert (found[0]["title"], found[0]["language"], "mqproc.open" in found[0]["code"]) == ("Start", "python", True)


@pytest.mark.parametrize(
    ("word", "title", "shown"),
    [
        ("consumers: groups", "consumers: Groups", "consumer"),
        ("spark", "spark", "mqproc spark counts"),
        ("SqlFilter", "filters", "SqlFilter"),
    ],
    ids=["title", "part of a title", "code"],
)
def test_examples_word_selects_by_title_or_code(word: str, title: str, shown: str) -> None:
    out = call("examples", word).out
    assert out.startswith(f"# {title}")
    assert shown in out
    assert "```" not in out


def test_examples_unknown_word_is_a_usage_error() -> None:
    outcome = call("examples", "kafka")
    assert (outcome.code, outcome.out) == (2, "")
    assert "no example contains 'kafka'; mqproc examples lists them" in outcome.err


def test_example_runs_as_printed(tmp_path: Path) -> None:
    code = call("examples", "Start", "--only", "python").out
    done = subprocess.run(
        [sys.executable, "-"], input=code, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
