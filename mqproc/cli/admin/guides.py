"""`mqproc examples`: the README's own examples, which its tests run, where there is a terminal and no README.

`examples.md` beside this is the project's README by a symlink: there is one text.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Final

import click

from mqproc.cli.options import Command, Invocation, pass_invocation
from mqproc.cli.output import Column

LANGUAGES: Final = ("sh", "python")
# It sets a clone up: whoever can call this has done so.
_NOT_FOR_USERS: Final = frozenset({"Start"})
_COLUMNS: Final = [Column("title"), Column("language"), Column("code")]
_LISTED: Final = [Column("title", "examples of"), *(Column(language, kind="count") for language in LANGUAGES)]
_SECTION: Final = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK: Final = re.compile(rf"^```({'|'.join(LANGUAGES)})\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Example:
    """One block of code, and the title of the section that it stands in."""

    title: str
    language: str
    code: str


def all_examples() -> list[Example]:
    """In the README's order."""
    text = files("mqproc.cli").joinpath("examples.md").read_text(encoding="utf-8")
    return [
        Example(title, language, code)
        for title, section in _SECTION.findall(text)
        if title not in _NOT_FOR_USERS
        for language, code in _BLOCK.findall(section)
    ]


def chosen(examples: list[Example], word: str) -> list[Example]:
    """Those of the sections that have the word in their title; if none has, those with it in their code."""
    wanted = word.lower()
    return [example for example in examples if wanted in example.title.lower()] or [
        example for example in examples if wanted in example.code.lower()
    ]


def _sections(examples: list[Example]) -> list[dict[str, str | int]]:
    """Each section with how many lines it has in which language."""
    sections: dict[str, dict[str, str | int]] = {}
    for each in examples:
        row = sections.setdefault(each.title, {"title": each.title, **dict.fromkeys(LANGUAGES, 0)})
        row[each.language] = int(row[each.language]) + each.code.count("\n")
    return list(sections.values())


@click.command(cls=Command)
@click.argument("word", default="")
@click.option("--only", type=click.Choice(LANGUAGES), help="Only the code in this language, to be piped or saved.")
@pass_invocation
def examples(invocation: Invocation, word: str, only: str | None) -> None:
    """Show examples: commands and Python that run as they stand.

    Without WORD a list; with it the examples that have it in their title, or else in their code: consumers,
    transactions, dlq, SqlFilter. All work on ./store: `mqproc examples transactions --only python | python`.
    """
    found = [each for each in chosen(all_examples(), word) if only in (None, each.language)]
    if not found:
        raise click.UsageError(f"no example tells of {word!r}; mqproc examples lists them")
    out = invocation.out
    if out.shape != "table":
        out.rows("examples", _COLUMNS, [asdict(each) for each in found])
        return
    if not (word or only):
        out.rows("examples", _LISTED, _sections(found))
        return
    if only:
        out.line("\n".join(each.code for each in found).rstrip("\n"))
        return
    title = ""
    for each in found:
        if each.title != title:
            title = each.title
            out.line(f"# {title}\n")
        out.line(each.code)
