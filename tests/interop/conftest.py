"""RocketMQ for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.rocketmq import RocketMq


@pytest.fixture(scope="module")
def rocketmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMq]:
    with RocketMq(tmp_path_factory.mktemp("rocketmq")) as program:
        yield program
