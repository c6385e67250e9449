"""Writers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.roles.rigs import BODY_MAX, MakeRig, WriterRig


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Makes rigs, and closes them."""
    rigs: list[WriterRig] = []

    def make(*, runs: bool = True, segments: int = 6, **options: object) -> WriterRig:
        settings = {"max_queues": 256, "default_topic_queue_nums": 4, "max_message_size": BODY_MAX} | options
        rigs.append(WriterRig(tmp_path / f"store-{len(rigs)}", runs=runs, segments=segments, **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
