"""File limits and OOM score: the unit's settings, and those that the supervisor applies.

`test_systemd` checks them on processes started by a real systemd.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mqproc.config.options import FIELDS
from mqproc.errors import StartError
from mqproc.layout import control as layout
from mqproc.supervisor import template as descriptors
from tests.supervisor.running_group import RunningGroup

StartGroup = Callable[..., RunningGroup]

DEPLOY = Path(__file__).parents[2] / "supervisor" / "deploy"
FILES_BESIDE_CLIENTS = 8192
"""Segments, ConsumeQueue and index files that a role may have open."""


def limit(unit: str, name: str) -> int:
    """A setting of a unit."""
    (found,) = re.findall(rf"^{name}=(.*)$", (DEPLOY / unit).read_text(), re.MULTILINE)
    return int(found)


@pytest.mark.parametrize("unit", ["mqproc.service", "mqproc@.service"])
def test_unit_has_descriptors_for_every_client(unit: str) -> None:
    clients_max = FIELDS["max_connections"].metadata["high"]
    assert limit(unit, "LimitNOFILE") >= clients_max + FILES_BESIDE_CLIENTS
    assert limit(unit, "OOMScoreAdjust") < 0


def test_limits_too_low_hard_limit_error_says_how_to_fix(start_group: StartGroup) -> None:
    group = start_group("--files=700", wait=False)
    assert group.wait() == 3
    assert any("the limit is 700 open files, and a group needs 768" in line for line in group.errors)
    assert any("LimitNOFILE=65536" in line for line in group.errors)


def test_limits_missing_proc_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(descriptors, "_OPEN", tmp_path / "self" / "fd")
    with pytest.raises(StartError, match=r"/proc is not mounted, .*: mount -t proc proc /proc"):
        descriptors.raise_open_files()


def test_limits_every_process_uses_its_hard_limit(start_group: StartGroup) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Half is less than the hard limit, and more than this process has open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        group = start_group("--roles=writer,query")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for process in (layout.SUPERVISOR, layout.TEMPLATE, "writer", "query"):
        assert psutil.Process(group.pid(process)).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard), process
    assert group.stop() == 0
