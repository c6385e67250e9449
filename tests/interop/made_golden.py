"""Golden stores that RocketMQ is asked to make, packed as they are kept."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.golden.fixtures import GOLDEN
from tests.interop.rocketmq import RocketMq

_TIMEOUT_S = 60


def make_golden(name: str, make: Callable[[RocketMq, Path], None]) -> None:
    """Have `make` fill a store, pack it as `name` and tell its size."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with RocketMq(folder) as rocketmq:
            make(rocketmq, folder / "store")
        archive = GOLDEN / f"{name}.tar.gz"
        # The wheel of the timer is 38 MB of which some pages are written.
        subprocess.run(["tar", "--sparse", "-czf", archive, "-C", folder, "store"], check=True, timeout=_TIMEOUT_S)
        print(json.dumps({"archive": str(archive), "bytes": archive.stat().st_size}))
