"""`mqproc guide` lists and shows the guides."""

from __future__ import annotations

from pathlib import Path

from tests.cli.calling import call
from tests.cli.pseudo_terminal import PseudoTerminal

GUIDES = Path(__file__).parents[2] / "mqproc" / "guides"


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
    assert "there is no guide 'kafka'; there are: benchmarks, concepts, " in outcome.err
