"""Frozen dataclasses with a quick beginning are what dataclasses are, and refuse what they would not carry out."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import dataclass, field

import pytest

from mqproc.frozen import quick_init


@dataclass(frozen=True, slots=True)
class Plain:
    name: str
    size: int = 3
    parts: list[int] = field(default_factory=list)


@quick_init
@dataclass(frozen=True, slots=True)
class Quick:
    name: str
    size: int = 3
    parts: list[int] = field(default_factory=list)


class Below(Quick):
    """A user's own kind, with attributes of its own."""

    mark = "m"


@pytest.mark.parametrize(
    ("arguments", "named"), [(("a",), {}), (("a", 4), {}), (("a",), {"parts": [1]}), ((), {"size": 0, "name": "b"})]
)
def test_it_stores_what_the_dataclass_would_store(arguments: tuple[str, ...], named: dict[str, object]) -> None:
    made = Quick(*arguments, **named)  # type: ignore[arg-type]
    assert dataclasses.astuple(made) == dataclasses.astuple(Plain(*arguments, **named))  # type: ignore[arg-type]
    assert made == Quick(*arguments, **named)  # type: ignore[arg-type]
    assert repr(made).replace("Quick", "Plain") == repr(Plain(*arguments, **named))  # type: ignore[arg-type]


def test_a_value_made_anew_is_not_shared() -> None:
    assert Quick("a").parts is not Quick("b").parts


def test_it_stays_frozen_can_be_replaced_copied_and_pickled() -> None:
    made = Quick("a", 1, [2])
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.size = 2  # type: ignore[misc]
    assert dataclasses.replace(made, size=9) == Quick("a", 9, [2])
    assert pickle.loads(pickle.dumps(made)) == copy.copy(made) == made


def test_a_class_below_it_keeps_its_kind() -> None:
    made = Below("a", size=5)
    assert (type(made), made.name, made.size, made.mark) == (Below, "a", 5, "m")


def test_its_signature_is_the_dataclass_s() -> None:
    assert str(inspect.signature(Quick)) == str(inspect.signature(Plain))


@pytest.mark.parametrize("arguments", [(), ("a", 1, [], 2)])
def test_wrong_arguments_are_refused_by_name(arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match=r"Quick\.__init__\(\)"):
        Quick(*arguments)  # type: ignore[arg-type]


def test_what_does_more_at_its_beginning_is_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Checked:
        size: int

        def __post_init__(self) -> None:
            raise AssertionError

    @dataclass(frozen=True)
    class Open:
        size: int

    @dataclass(frozen=True, slots=True)
    class Named:
        size: int = field(kw_only=True)

    for kind, reason in ((Checked, "more at its beginning"), (Open, "has no slot"), (Named, "more at its beginning")):
        with pytest.raises(TypeError, match=reason):
            quick_init(kind)
