"""What the simulator runs is what the supervisor runs: its own classes, and nothing in them is replaced."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import mqproc
from mqproc.config.options import FlushDiskType
from mqproc.layout import control as words_of
from mqproc.roles.registry import SPECS
from tests.crash.disk import Disk, Journal
from tests.crash.group import Group, Schedule, SimulatedClock
from tests.crash.levels import options_of
from tests.crash.producers import SimulatedIds
from tests.crash.recording_io import Machine
from tests.crash.story import FIRST_MS, boot, simulated_boots, simulated_ids

TURNS = 200
FUNCTIONS_MIN = 1_000
PRODUCT = Path(mqproc.__file__).resolve().parent
# The product's functions, Python's and its libraries', and what decorators and dataclasses make.
WHERE = (str(PRODUCT), str(PRODUCT.parent / "supervisor"), sys.prefix, sys.base_prefix, "<string>", "<attrs", "<frozen")


def functions(of: Any, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """(name, function) of all that a module, or a class of it, defines."""
    for name, value in list(vars(of).items()):
        plain = inspect.unwrap(getattr(value, "py_func", getattr(value, "__func__", getattr(value, "fget", value))))
        if inspect.isfunction(plain):
            yield f"{module.__name__}.{name}", plain
        elif inspect.isclass(value) and value.__module__ == module.__name__ and value is not of:
            yield from functions(value, module)


def test_each_role_is_the_supervisors_and_nothing_of_the_product_is_replaced(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path), simulated_ids(SimulatedIds()), simulated_boots():
        boot(0)
        root = Path("store")
        root.mkdir()
        machine, schedule = Machine(Disk.of(root)), Schedule(random.Random(0), Journal())
        machine.between = schedule.pause
        clock = SimulatedClock(schedule, FIRST_MS)
        group = Group(root, options_of(FlushDiskType.ASYNC_FLUSH), machine, schedule, clock)
        try:
            for _ in range(TURNS):
                schedule.turn()
            # A factory is the class, or a function that is annotated with it.
            factories = {spec.name: spec.factory for spec in SPECS if spec.name != words_of.MONITOR}
            expected = {
                name: get_type_hints(of)["return"] if inspect.isfunction(of) else of for name, of in factories.items()
            }
            assert {name: type(role) for name, role in group.roles.items()} == expected
            loaded = [module for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "mqproc"]
            found = [each for module in loaded for each in functions(module, module)]
        finally:
            group.kill_all()
    replaced = [(name, place) for name, plain in found if not (place := plain.__code__.co_filename).startswith(WHERE)]
    assert len(found) > FUNCTIONS_MIN
    assert replaced == []
