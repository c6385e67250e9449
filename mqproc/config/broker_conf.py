"""RocketMQ's `broker.conf`: parsing, and detection of misspelt names.

RocketMQ has many names that mqproc does not, so unknown names are ignored; one that almost equals an option's name is
an error, since the option would silently keep its default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqproc.errors import ConfigurationError

STORE_NAMES: Final = ("storePathRootDir", "storePathCommitLog", "readOnlyCommitLogStorePaths")
"""Names that locate a store; they are not options."""
# RocketMQ's own, although similar to an option's name.
_ROCKETMQS: Final = frozenset({"brokerIP2"})
_COMMENTS: Final = ("#", "!")


@dataclass(frozen=True, slots=True)
class ConfLine:
    """`name=value`, and its line number, from 1."""

    number: int
    name: str
    value: str


def read_lines(path: Path) -> list[ConfLine]:
    """Read all assignments. Raises ConfigurationError for a line that is not NAME=VALUE."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return [_line(path, number, text) for number, text in _logical(lines)]


def _logical(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Join lines as Java's Properties do: a trailing backslash continues all but comments."""
    begun, text = 0, ""
    for number, line in enumerate(lines, 1):
        part = line.lstrip()
        if not text and (not part or part.startswith(_COMMENTS)):
            continue
        begun = begun if text else number
        text += part
        if _goes_on(part):
            text = text[:-1]
            continue
        yield begun, text.rstrip()
        text = ""
    if text:
        yield begun, text.rstrip()


def _goes_on(text: str) -> bool:
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _line(path: Path, number: int, text: str) -> ConfLine:
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise ConfigurationError(f"{path}, line {number}: {text!r} is not NAME=VALUE")
    return ConfLine(number, name.strip(), value.strip())


def check_spelling(path: Path, lines: Iterable[ConfLine], known: Iterable[str]) -> list[str]:
    """Names in `lines` that are neither `known` nor similar to a known one.

    Raises ConfigurationError for a name that differs from a known one by one letter, case or underscores.
    """
    plain = {_plain(name): name for name in (*known, *STORE_NAMES)}
    unknown = [line for line in lines if line.name not in plain.values()]
    for line in unknown:
        meant = next((plain[name] for name in plain if _is_near(_plain(line.name), name)), None)
        if meant is not None and line.name not in _ROCKETMQS:
            raise ConfigurationError(
                f"{path}, line {line.number}: no option is called {line.name!r}; did you mean {meant}?"
            )
    return list(dict.fromkeys(line.name for line in unknown))


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _is_near(one: str, other: str) -> bool:
    """Whether the names differ by one inserted, deleted, replaced or transposed letter."""
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    one, other = one[same:], other[same:]
    return (
        one[1:] == other
        or one == other[1:]
        or one[1:] == other[1:]
        or (one[:2] == other[1::-1] and one[2:] == other[2:])
    )
