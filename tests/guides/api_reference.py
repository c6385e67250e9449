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
    "Send": ["Producer", "Batch", "RetryPolicy"],
    "Consume": ["Consumer", "SimpleConsumer", "Groups", "ResetTo", "Move"],
    "Transactions": ["Transaction", "TransactionProducer", "Transactions"],
    "Filters": ["TagFilter", "SqlFilter", "Conditions"],
}
ASYNC = {
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

HEAD = """# Python API

Generated from the docstrings. Every name is imported from `mqproc`. All errors derive from `mqproc.MqprocError`.

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
                if base.__name__ in INTERNAL and name != "close":
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
    """A docstring as Markdown: an indented block after "Example:" becomes a code block."""
    text = inspect.getdoc(found) or ""
    head, _, example = text.partition("\nExample:\n")
    if not example:
        return text
    return f"{head.strip()}\n\n```python notest\n{textwrap.dedent(example).strip()}\n```"


def examples() -> Iterator[tuple[str, str]]:
    """(name, code) of each example in a docstring of a public class, method or function."""
    for name in mqproc.__all__:
        found = getattr(mqproc, name)
        members = [(name, found)]
        if inspect.isclass(found):
            members += [(f"{name}.{member}", function) for member, function in _methods(found)]
        for label, member in members:
            _, _, example = (inspect.getdoc(member) or "").partition("\nExample:\n")
            if example:
                yield label, textwrap.dedent(example).strip()


if __name__ == "__main__":
    TARGET.write_text(reference())
