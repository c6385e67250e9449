"""Names that count how often they are compared, for what must not look at every queue once for every topic."""

from __future__ import annotations

from typing import Any, ClassVar


class CountedName(str):
    """A text that counts comparisons of all of its kind."""

    __slots__ = ()
    compared: ClassVar[int] = 0

    __hash__ = str.__hash__

    def __eq__(self, other: Any) -> bool:
        CountedName.compared += 1
        return str.__eq__(self, other)

    @classmethod
    def many(cls, count: int) -> list[CountedName]:
        """So many names, none of them compared yet."""
        cls.compared = 0
        return [cls(f"topic-{number:04}") for number in range(count)]
