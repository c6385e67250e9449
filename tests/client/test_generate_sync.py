"""The synchronous client is generated from the asynchronous one."""

from __future__ import annotations

import pytest

from tests.client.generate_sync import MODULES, TARGET, generated


@pytest.mark.parametrize("name", MODULES)
def test_sync_module_equals_the_generators_output(name: str) -> None:
    assert (TARGET / f"{name}.py").read_text() == generated(name), "run python -m tests.client.generate_sync"
