"""RocketMQ for the tests of a file, which run once for each release."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.rocketmq import VERSIONS, RocketMq


@pytest.fixture(scope="module", params=VERSIONS)
def rocketmq(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMq]:
    with RocketMq(tmp_path_factory.mktemp("rocketmq"), request.param) as program:
        yield program
