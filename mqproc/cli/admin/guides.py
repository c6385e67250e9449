"""`mqproc guide` and `mqproc examples`: guides to common tasks, and the examples in them.

Guides are the Markdown files in `mqproc/guides`. `mqproc/cli/examples.md` is a symbolic link to the project's README.
Tests run the examples of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Final

import click

from mqproc.cli.options import Invocation, command
from mqproc.cli.output import OutputColumn, output_columns

_GUIDE_COLUMNS: Final = output_columns("name:text:guide", "title:text:about")
LANGUAGES: Final = ("sh", "python")
# Sections that users of the command do not need any more.
_OMITTED_SECTIONS: Final = frozenset({"Install"})
_EXAMPLE_COLUMNS: Final = output_columns("title", "language", "code")
_SECTION_COLUMNS: Final = [
    *output_columns("title:text:examples of"),
    *(OutputColumn(language, kind="count") for language in LANGUAGES),
]


# Guides


def guide_texts() -> dict[str, str]:
    """The guides' Markdown texts by name."""
    folder = files("mqproc").joinpath("guides")
    if not folder.is_dir():
        return {}
    found = sorted((each for each in folder.iterdir() if each.name.endswith(".md")), key=lambda each: each.name)
    return {each.name.removesuffix(".md"): each.read_text(encoding="utf-8") for each in found}


def _first_line(text: str) -> str:
    return next((line.lstrip("# ").strip() for line in text.splitlines() if line.strip()), "")


def _complete_guide(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in guide_texts() if name.startswith(incomplete)]


@command()
@click.argument("name", required=False, shell_complete=_complete_guide)
def guide(invocation: Invocation, name: str | None) -> None:
    """Show a guide, or list the guides.

    Without NAME it lists the guides with their titles. On a terminal a guide is formatted; into a pipe its Markdown
    text is written unchanged.
    """
    guides, out = guide_texts(), invocation.out
    if name is None:
        rows = [{"name": each, "title": _first_line(text)} for each, text in guides.items()]
        out.rows("guides", _GUIDE_COLUMNS, rows)
        return
    name = name.removesuffix(".md")
    if name not in guides:
        raise click.UsageError(f"there is no guide {name!r}; there are: {', '.join(guides) or 'none'}")
    text = guides[name]
    if out.is_json:
        out.document({"name": name, "title": _first_line(text), "text": text})
    elif out.is_terminal:
        from rich.markdown import Markdown

        out.console().print(Markdown(text))
    else:
        out.line(text.rstrip("\n"))


# Examples


@dataclass(frozen=True, slots=True)
class Example:
    """A block of code with the title of its section."""

    title: str
    language: str
    code: str


def all_examples() -> list[Example]:
    """The examples of the README and the guides, whose titles begin with the guide's name."""
    readme = files("mqproc.cli").joinpath("examples.md").read_text(encoding="utf-8")
    found = list(_examples_in(readme, ""))
    for name, text in guide_texts().items():
        found += _examples_in(text, name)
    return [example for example in found if example.title not in _OMITTED_SECTIONS]


def _examples_in(text: str, document: str) -> Iterator[Example]:
    """The code blocks of a Markdown text."""
    title, language, code = document, "", ""
    for line in text.splitlines(keepends=True):
        if language and not line.startswith("```"):
            code += line
        elif language:
            if language in LANGUAGES:
                yield Example(title, language, code)
            language, code = "", ""
        elif line.startswith("```"):
            language = line.removeprefix("```").strip() or "text"
        elif line.startswith("## "):
            section = line.removeprefix("## ").strip()
            title = f"{document}: {section}" if document else section


def select_examples(examples: list[Example], word: str) -> list[Example]:
    """The examples with the word in their title, else those with it in their code."""
    lowered = word.lower()
    return [example for example in examples if lowered in example.title.lower()] or [
        example for example in examples if lowered in example.code.lower()
    ]


def _sections(examples: list[Example]) -> list[dict[str, str | int]]:
    """Each section with its number of lines by language."""
    sections: dict[str, dict[str, str | int]] = {}
    for each in examples:
        row = sections.setdefault(each.title, {"title": each.title, **dict.fromkeys(LANGUAGES, 0)})
        row[each.language] = int(row[each.language]) + each.code.count("\n")
    return list(sections.values())


@command()
@click.argument("word", default="")
@click.option("--only", type=click.Choice(LANGUAGES), help="Print only the code in this language.")
def examples(invocation: Invocation, word: str, only: str | None) -> None:
    """Show examples: commands and Python code that run as shown.

    Without WORD it lists them. With WORD it shows the examples that have it in their title, or else in their code:
    consumers, transactions, dlq, SqlFilter. All use ./store: `mqproc examples transactions --only python | python`.
    """
    found = [each for each in select_examples(all_examples(), word) if only in (None, each.language)]
    if not found:
        raise click.UsageError(f"no example contains {word!r}; mqproc examples lists them")
    out = invocation.out
    if out.shape != "table":
        out.rows("examples", _EXAMPLE_COLUMNS, [asdict(each) for each in found])
        return
    if not (word or only):
        out.rows("examples", _SECTION_COLUMNS, _sections(found))
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
