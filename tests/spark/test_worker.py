"""Memory of Spark's Python worker processes."""

from __future__ import annotations

import subprocess
import sys

_TASK = """
import gc
from mqproc.spark.worker import run_task
began = gc.get_freeze_count()  # Some are Python 3.12's own.
task = run_task(iter("ab"))
print(next(task), gc.get_freeze_count() > began)
print(next(task), next(task, None), gc.get_freeze_count() > began)
before = gc.get_freeze_count()
later = [[] for _ in range(1000)]
print(list(run_task(iter("c"))), gc.get_freeze_count() <= before)
"""


def test_objects_of_first_task_are_frozen_for_gc() -> None:
    # In a fresh process: the effect is permanent.
    done = subprocess.run([sys.executable, "-c", _TASK], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == ["a False", "b None True", "['c'] True"], done.stderr
