"""The consumer model holds for a few seeds; `python -m tests.model 0:100` runs more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model.program import Deaths, run
from tests.support.group import Group


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    started = Group(tmp_path_factory.mktemp("model") / "store").start()
    yield started
    started.close()


@pytest.fixture(scope="module")
def deaths() -> Deaths:
    return Deaths()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("seed", [1, 2])
def test_model_random_programs_hold(group: Group, deaths: Deaths, seed: int) -> None:
    run(group, seed, deaths)
