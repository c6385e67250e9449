"""The unit under a real systemd: READY, STATUS, reload, and restart of a hung supervisor.

The unit's limits apply to every process of the group: descriptors, and the OOM score.

systemd's user instance runs in separate namespaces, with the unit's settings for start, stop, reload, watchdog and
restart. Such an instance does not support the unit's sandbox settings (users, folders, system calls), which
`test_deploy` checks.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mqproc.layout import control as layout
from tests.supervisor.running_group import PROGRAM

pytestmark = pytest.mark.timeout(400)  # Slow: with `-n …` it starts before others.

SYSTEMD = Path("/usr/lib/systemd/systemd")
UNIT = Path(__file__).parents[2] / "supervisor" / "deploy" / "mqproc.service"
WATCHDOG_S = 8
# The unit's settings that a user instance supports: the protocol between supervisor and systemd.
KEPT = re.compile(
    r"^(Type|NotifyAccess|ExecReload|TimeoutStartSec|TimeoutStopSec|KillMode|Restart\w*|OOMPolicy)=.*$", re.MULTILINE
)
LIMITS = ("LimitNOFILE", "OOMScoreAdjust")
SCRIPT = """
set -u
mount -t tmpfs tmpfs /run && mkdir -p -m 700 /run/systemd/system /run/user || exit 77
export XDG_RUNTIME_DIR=/run/user SYSTEMD_UNIT_PATH={folder}:
{systemd} --user --log-target=console >{folder}/log 2>&1 &
show() {{ systemctl --user show mq.service -p "$1" --value; }}
until_is() {{ for _ in $(seq 600); do [ "$(show "$1")" = "$2" ] && return; sleep 0.1; done; echo "$1 is not $2"; }}
for _ in $(seq 300); do [ -S /run/user/systemd/private ] && break; sleep 0.1; done
timeout 100 systemctl --user start mq.service || exit 77
echo "started $(show SubState)"
case "$(show StatusText)" in ready*) echo "status ready";; esac
echo 777 > {folder}/store/new_size
systemctl --user reload mq.service && echo "reloaded"
for _ in $(seq 300); do grep -q "reload 777" {folder}/store/events && echo "options reloaded" && break; sleep 0.1; done
first=$(show MainPID)
group="$first $(cat /proc/$first/task/$first/children)"
echo "processes $(echo $group | wc -w)"
for pid in $group; do awk '/^Max open files/ {{print "files " $4 " " $5}}' /proc/$pid/limits; done | sort -u
for pid in $group; do echo "oom $(cat /proc/$pid/oom_score_adj)"; done | sort -u
kill -STOP "$first"
until_is NRestarts 1
until_is SubState running
[ "$(show MainPID)" != "$first" ] && echo "replaced"
timeout 100 systemctl --user stop mq.service
echo "stopped $(show ActiveState) $(show Result)"
"""


def can(script: str) -> bool:
    """True if a shell can run the script."""
    return subprocess.run(["bash", "-c", script], capture_output=True, check=False).returncode == 0


def limits() -> dict[str, int]:
    """The unit's limits, replaced where only a system instance may set them.

    They are inherited by the same processes.
    """
    unit = UNIT.read_text()
    found = {name: int(re.findall(rf"^{name}=(.*)$", unit, re.MULTILINE)[0]) for name in LIMITS}
    if not can(f"ulimit -Hn {found['LimitNOFILE']}"):
        found["LimitNOFILE"] = resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2
    if not can(f"echo {found['OOMScoreAdjust']} > /proc/self/oom_score_adj"):
        found["OOMScoreAdjust"] *= -1
    return found


def test_systemd_starts_reloads_watches_and_stops_group(tmp_path: Path) -> None:
    tools = ("unshare", "systemctl")
    if os.geteuid() != 0 or not SYSTEMD.exists() or not all(map(shutil.which, tools)):
        pytest.skip("a systemd of one's own needs root, systemd and unshare")
    limited = limits()
    lines = [found[0] for found in KEPT.finditer(UNIT.read_text())]
    kept = "\n".join([*lines, *(f"{name}={value}" for name, value in limited.items())])
    environment = f"Environment=PYTHONPATH={PROGRAM.parents[2]}"
    start = f"ExecStart={sys.executable} {PROGRAM} {tmp_path}/store"
    (tmp_path / "mq.service").write_text(f"[Service]\n{kept}\nWatchdogSec={WATCHDOG_S}\n{environment}\n{start}\n")
    script = SCRIPT.format(folder=tmp_path, systemd=SYSTEMD)
    command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    if done.returncode == 77:
        pytest.skip(f"systemd does not run here: {done.stderr.strip()[-300:]}")
    said = done.stdout.splitlines()
    assert said == [
        "started running",
        "status ready",
        "reloaded",
        "options reloaded",
        f"processes {len(layout.ROLES) + 2}",
        "files {0} {0}".format(limited["LimitNOFILE"]),
        f"oom {limited['OOMScoreAdjust']}",
        "replaced",
        "stopped inactive success",
    ], (done.stdout, done.stderr, (tmp_path / "log").read_text()[-2000:])
