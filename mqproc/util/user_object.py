"""Base class of the objects that users hold."""

from __future__ import annotations

from typing import ClassVar


class UserObject:
    """`dir` shows what users call; `_internal` names the members for mqproc's own modules."""

    __slots__ = ()
    _internal: ClassVar[frozenset[str]] = frozenset()

    def __dir__(self) -> list[str]:
        hidden = frozenset().union(*(vars(base).get("_internal", ()) for base in type(self).__mro__))
        return [name for name in super().__dir__() if name not in hidden]
