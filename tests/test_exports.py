"""The public API: exported names exist, are sorted, and are cheap to import."""

from __future__ import annotations

import inspect
import itertools
import pydoc
import subprocess
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pandas
import polars
import pyarrow
import pytest

import mqproc
import mqproc.client
from mqproc.errors import ERROR_BY_CODE


@pytest.mark.parametrize("module", [mqproc, mqproc.client])
def test_exported_names_exist_and_are_sorted(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    for name in names:
        assert getattr(module, name) is not None
    assert len(set(names)) == len(names)
    constants = [name for name in names if name.isupper()]
    dunders = [name for name in names if name.startswith("__")]
    functions = [name for name in names if name[0].islower()]
    classes = [name for name in names if name[0].isupper() and name not in constants]
    assert names == [*constants, *sorted(classes), *dunders, *sorted(functions)]


@pytest.mark.parametrize("module", [mqproc, mqproc.client])
def test_help_describes_every_exported_name(module: Any) -> None:
    told = pydoc.render_doc(module, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    for name in module.__all__:
        assert name.strip("_") in told.replace("VERSION", "version")
        if inspect.isclass(getattr(module, name)):
            assert inspect.signature(getattr(module, name))


def test_exports_have_every_error() -> None:
    assert {error.__name__ for error in ERROR_BY_CODE.values()} <= set(mqproc.__all__)


# Modules below the public calls.
_PLUMBING = {"give_connection", "pipeline", "reading", "run", "run_again", "run_all", "take_connection"}


def _types_of(hint: Any) -> Iterator[type]:
    """mqproc's own types in an annotation."""
    if isinstance(hint, list | tuple):
        for part in hint:
            yield from _types_of(part)
    elif isinstance(hint, type) and hint.__module__.startswith("mqproc"):
        yield hint
    yield from itertools.chain.from_iterable(map(_types_of, typing.get_args(hint)))


def _named_by(kind: type) -> Iterator[type]:
    """mqproc's own types in the public methods, properties and fields of a type."""
    others = {"pa": pyarrow, "pandas": pandas, "polars": polars, "ClassVar": typing.ClassVar}
    names = {name: getattr(mqproc, name) for name in mqproc.__all__} | others
    found = [member for name, member in inspect.getmembers(kind) if not name.startswith("_") and name not in _PLUMBING]
    for member in [kind, *found]:
        function = member.fget if isinstance(member, property) else member
        if hasattr(function, "__annotations__"):
            module = vars(sys.modules[function.__module__])
            hints = typing.get_type_hints(function, names | module)
            yield from _types_of([hint for name, hint in hints.items() if not name.startswith("_")])


def test_exports_have_every_type_of_public_methods() -> None:
    public = [getattr(mqproc, name) for name in mqproc.__all__ if inspect.isclass(getattr(mqproc, name))]
    named = {used for kind in public for used in _named_by(kind)}
    assert {kind.__qualname__ for kind in named - set(public)} == set()


def test_other_names_raise_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mqproc.nothing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mqproc.client.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_import_package_is_lazy_and_finds_modules() -> None:
    program = (
        "import sys, mqproc\n"
        "print([name for name in sys.modules if name.startswith('mqproc.')])\n"
        "print(issubclass(mqproc.errors.StartError, mqproc.MqprocError), mqproc.types.Message is mqproc.Message)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "['mqproc.util', 'mqproc.util.sources']\nTrue True\n"


def test_import_client_loads_only_what_it_needs() -> None:
    program = "import sys, mqproc; mqproc.Client; print({'numba', 'pyarrow', 'asyncio', 'email'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "set()"
