"""A short soak always, a long one where MQPROC_SOAK says how many minutes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mqproc.layout import control as words_of
from tests.soak.soak import Soak

MINUTES = float(os.environ.get("MQPROC_SOAK", "0"))


@pytest.mark.timeout(600 + 60 * MINUTES)
def test_nothing_is_lost_under_mixed_load_and_kills(tmp_path: Path) -> None:
    soak = Soak(tmp_path, 60 * MINUTES) if MINUTES else Soak(tmp_path, 12.0, kill_every_s=1.0)
    soak.run()
    assert soak.kills.keys() == set(words_of.ROLES) if MINUTES else soak.kills
