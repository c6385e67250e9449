"""Frozen dataclasses that cost little to make.

Python fills a frozen dataclass by `object.__setattr__`, a field at a time, which takes two thirds of the time that a
small one takes to make. A slot can be stored to directly, whatever the class says of its attributes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


class _Factory:
    """Stands for a value that is made anew each time."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def quick_init(cls: C) -> C:
    """Give a dataclass with slots an `__init__` of the same signature that stores to its slots directly.

        @quick_init
        @dataclass(frozen=True, slots=True)
        class Place: …

    Raises TypeError for one without slots, with a `__post_init__`, or with fields that are not all taken in order.
    """
    fields = dataclasses.fields(cls)
    if hasattr(cls, "__post_init__") or not all(field.init and not field.kw_only for field in fields):
        raise TypeError(f"{cls.__name__} does more at its beginning than to store its fields")
    known: dict[str, Any] = {"_FACTORY": _FACTORY}
    parameters, stores = [], []
    for field in fields:
        slot: Any = cls.__dict__.get(field.name)
        if not hasattr(slot, "__set__"):
            raise TypeError(f"{cls.__name__}.{field.name} has no slot")
        known[f"_set_{field.name}"] = slot.__set__
        value = field.name
        if field.default_factory is not dataclasses.MISSING:
            known[f"_make_{field.name}"] = field.default_factory
            parameters.append(f"{field.name}=_FACTORY")
            value = f"_make_{field.name}() if {field.name} is _FACTORY else {field.name}"
        elif field.default is not dataclasses.MISSING:
            known[f"_default_{field.name}"] = field.default
            parameters.append(f"{field.name}=_default_{field.name}")
        else:
            parameters.append(field.name)
        stores.append(f"    _set_{field.name}(self, {value})")
    source = "\n".join([f"def __init__(self, {', '.join(parameters)}):", *stores])
    exec(source, known)  # As dataclasses do: a loop over the fields would cost more than it saves.
    made = known["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__module__ = cls.__module__
    made.__annotations__ = dict(cls.__dict__["__init__"].__annotations__)
    setattr(cls, "__init__", made)  # noqa: B010 -- mypy takes a plain assignment for a mistake
    return cls
