"""What the person at the terminal has chosen, and what each key changes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mqproc.cli.top.figures import VIEWS, View

HELP = (
    ("1 2 3 4, tab", "roles, topics, groups, errors"),
    ("← →", "sort by the column before or behind"),
    ("r", "turn the order round"),
    ("/", "show only rows with a text; Esc takes it back"),
    ("↑ ↓ PgUp PgDn", "move through the rows"),
    ("space", "hold the picture, and let it go on"),
    ("+ -", "look more often, less often"),
    ("?", "this help"),
    ("q, Ctrl-C", "leave"),
)
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.2, 60.0


@dataclass(slots=True)
class State:
    """The choices; `key` changes them."""

    view: View = VIEWS[0]
    interval_s: float = 1.0
    filter: str = ""
    typing: bool = False
    held: bool = False
    helped: bool = False
    ended: bool = False
    first: int = 0
    """The first row shown."""
    orders: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """By view: the column, and whether the smallest comes first."""

    @property
    def sort(self) -> str:
        return self.orders.get(self.view.name, (self.view.sort, False))[0]

    @property
    def ascending(self) -> bool:
        return self.orders.get(self.view.name, (self.view.sort, False))[1]

    def sort_by(self, name: str, *, ascending: bool = False) -> None:
        """Order the view that is shown by a column."""
        self.orders[self.view.name] = (name, ascending)

    def key(self, key: str) -> None:
        """Take a key."""
        if self.typing:
            self._type(key)
        elif self.helped:
            self.helped, self.ended = False, key == "q"
        else:
            self._command(key)

    def _type(self, key: str) -> None:
        if key == "enter":
            self.typing = False
        elif key == "escape":
            self.typing, self.filter = False, ""
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1:
            self.filter += key
        self.first = 0

    def _command(self, key: str) -> None:
        if key == "q":
            self.ended = True
        elif key == "?":
            self.helped = True
        elif key == "/":
            self.typing = True
        elif key == "escape":
            self.filter = ""
        elif key == " ":
            self.held = not self.held
        elif key == "r":
            self.sort_by(self.sort, ascending=not self.ascending)
        elif key in ("+", "="):
            self.interval_s = max(INTERVAL_S_MIN, self.interval_s / 2)
        elif key == "-":
            self.interval_s = min(INTERVAL_S_MAX, self.interval_s * 2)
        elif key in ("left", "right"):
            self._move_sort(1 if key == "right" else -1)
        elif key == "tab" or (key.isdigit() and 0 < int(key) <= len(VIEWS)):
            self._show(VIEWS[(VIEWS.index(self.view) + 1) % len(VIEWS)] if key == "tab" else VIEWS[int(key) - 1])
        else:
            self._scroll(key)

    def _show(self, view: View) -> None:
        self.view, self.first = view, 0

    def _move_sort(self, step: int) -> None:
        names = [column.name for column in self.view.columns]
        self.sort_by(names[(names.index(self.sort) + step) % len(names)], ascending=self.ascending)

    def _scroll(self, key: str) -> None:
        steps = {"up": -1, "down": 1, "page-up": -10, "page-down": 10, "home": -(1 << 30), "end": 1 << 30}
        self.first = max(0, self.first + steps.get(key, 0))
