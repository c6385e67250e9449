"""Commands that name no store take none of a group that another test runs meanwhile."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_running_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide running groups from commands in this process."""
    monkeypatch.setattr("mqproc.cli.options.running_stores", list)
