"""Steps are those of what is run, not of what Python does beside it."""

from __future__ import annotations

import gc

from tests.client.steps import steps_of


def test_no_garbage_is_collected_meanwhile() -> None:
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
