"""`steps_of` counts calls of the function only, not of Python's own work."""

from __future__ import annotations

import gc

from tests.client.conftest import steps_of


def test_steps_of_collects_no_garbage() -> None:
    def note(phase: str, info: dict[str, int]) -> None:
        pass

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        found, steps = steps_of(lambda: [[] for _ in range(100)])
        assert len(found) == 100
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert "note" not in steps
    assert gc.isenabled()
