"""Generate mqproc/guides/api.md from docstrings: `python -m tests.guides.api_reference`."""

from __future__ import annotations

import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import mqproc

TARGET = Path(mqproc.__file__).parent / "guides" / "api.md"
SECTIONS = {
    "Open a store": ["open", "Client", "AsyncClient", "StoreReader"],
    "Read": ["ArrowStream"],
    "Send": ["Producer", "SendHandle", "AsyncSendHandle", "Batch", "RetryPolicy"],
    "Consume": ["Consumer", "SimpleConsumer", "Groups", "ResetTo", "Move"],
    "Transactions": ["Transaction", "TransactionProducer", "Transactions"],
    "Filters": ["TagFilter", "SqlFilter", "Conditions"],
}
ASYNC = {
    "AsyncArrowStream": "ArrowStream",
    "AsyncConsumer": "Consumer",
    "AsyncGroups": "Groups",
    "AsyncProducer": "Producer",
    "AsyncSimpleConsumer": "SimpleConsumer",
    "AsyncTransaction": "Transaction",
    "AsyncTransactionProducer": "TransactionProducer",
    "AsyncTransactions": "Transactions",
}
INTERNAL = ("Connections", "AsyncConnections")
"""Base classes whose methods serve the client itself, except `close`."""
INTERNAL_METHODS = ("start",)
"""Called by the client that makes the object."""
_EXAMPLE = re.compile(r"\s*\bExample:(?:\n(?P<block>(?:    .*\n?)+)|\s`(?P<line>[^`]+)`)\s*$")

HEAD = """# Python API

Generated from the docstrings. Every name is imported from `mqproc`. All errors derive from `mqproc.MqprocError`.

In the examples `client` is a Client or an AsyncClient, `message` a StoredMessage, and the other
names are objects of the section's class.

`AsyncClient` has the methods of `Client` as coroutines. Its objects (`AsyncConsumer`, `AsyncProducer`, …) correspond to
those of `Client` in the same way.
"""


def reference() -> str:
    """Text of the guide."""
    parts = [HEAD]
    listed = {name for names in SECTIONS.values() for name in names} | set(ASYNC)
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [_document(name) for name in names]
    others = [name for name in mqproc.__all__ if name not in listed and not name.startswith("__")]
    results = [name for name in others if not name.endswith("Error")]
    parts.append("## Messages and results\n")
    parts += [_document(name) for name in results]
    parts.append("## Errors\n\n| error | code | exit code | meaning |\n|---|---|---|---|")
    for name in (name for name in others if name.endswith("Error")):
        error = getattr(mqproc, name)
        meaning = " ".join((inspect.getdoc(error) or "").split()).replace("|", "\\|")
        parts.append(f"| `{name}` | `{error.code}` | {error.exit_code} | {meaning} |")
    return "\n".join(parts) + "\n"


def _document(name: str) -> str:
    found = getattr(mqproc, name)
    if not inspect.isclass(found):
        return f"### {name}\n\n```python notest\n{_signature(f'mqproc.{name}', found)}\n```\n\n{_text(found)}\n"
    lines = [f"### {name}\n"]
    if not issubclass(found, enum.Enum) and _is_made_by_users(name):
        lines.append(f"```python notest\n{_signature(f'mqproc.{name}', found)}\n```\n")
    lines.append(_text(found) + "\n")
    fields = list(_fields(found))
    if fields:
        lines.append("\n".join(["| field | |", "|---|---|", *fields]) + "\n")
    for member, function in _methods(found):
        lines.append(f"#### {name}.{member}\n")
        lines.append(f"```python notest\n{_signature(f'{name}.{member}', function)}\n```\n\n{_text(function)}\n")
    return "\n".join(lines)


def _is_made_by_users(name: str) -> bool:
    made = (
        "Client",
        "AsyncClient",
        "StoreReader",
        "Message",
        "RetryPolicy",
        "ResetTo",
        "SqlFilter",
        "TagFilter",
        "Batch",
    )
    return name in made or name == "Conditions"


def _fields(cls: type) -> Iterator[str]:
    """Rows for an enum's members and a class's properties."""
    if issubclass(cls, enum.Enum):
        yield from (f"| `{member.name}` | |" for member in cls)
        return
    for name, member in inspect.getmembers_static(cls):
        if not name.startswith("_") and isinstance(member, property):
            yield f"| `{name}` | {' '.join((inspect.getdoc(member) or '').split())} |"


def _methods(cls: type) -> Iterator[tuple[str, object]]:
    """Public methods in the order of their definition, those of base classes of mqproc included."""
    seen: dict[str, object] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("mqproc"):
            for name, member in vars(base).items():
                if (base.__name__ in INTERNAL and name != "close") or name in INTERNAL_METHODS:
                    continue
                member = inspect.unwrap(getattr(member, "__func__", member))
                if not name.startswith("_") and inspect.isfunction(member):
                    seen[name] = member
    yield from ((name, member) for name, member in seen.items() if inspect.getdoc(member))


def _signature(name: str, found: object) -> str:
    try:
        signature = inspect.signature(found)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"{name}(...)"
    arguments, keywords = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            arguments.append("*")
        arguments.append(_argument(parameter))
    returned = _type(signature.return_annotation)
    end = f" -> {returned}" if returned else ""
    text = f"{name}({', '.join(arguments)}){end}"
    if len(text) <= 100:
        return text
    inner = ",\n".join("    " + argument for argument in arguments)
    return f"{name}(\n{inner},\n){end}"


def _argument(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    annotation = _type(parameter.annotation)
    text = f"{stars}{parameter.name}" + (f": {annotation}" if annotation else "")
    return text if parameter.default is parameter.empty else f"{text} = {parameter.default!r}"


def _type(annotation: object) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\bmqproc\.(?:\w+\.)*", "", text)


def _text(found: object) -> str:
    """A docstring as Markdown, with the example as a code block."""
    text, example = _text_and_example(found)
    return f"{text}\n\n```python notest\n{example}\n```" if example else text


def _text_and_example(found: object) -> tuple[str, str]:
    """A docstring's text, and its example: an indented block, or code in the same line."""
    text = inspect.getdoc(found) or ""
    match = _EXAMPLE.search(text)
    if match is None:
        return text, ""
    return text[: match.start()], match["line"] or textwrap.dedent(match["block"]).strip()


def methods() -> Iterator[tuple[str, object]]:
    """Each public function and method with its name, such as `Client.send`."""
    for name in mqproc.__all__:
        found = getattr(mqproc, name)
        if inspect.isclass(found):
            yield from ((f"{name}.{member}", function) for member, function in _methods(found))
        elif inspect.isfunction(found):
            yield name, found


def examples() -> Iterator[tuple[str, str]]:
    """Name and code of each example."""
    for name, found in methods():
        _, example = _text_and_example(found)
        if example:
            yield name, example


if __name__ == "__main__":
    TARGET.write_text(reference())
