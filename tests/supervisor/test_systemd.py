"""The unit under a real systemd: READY is waited for, STATUS is shown, a reload is one, a hung supervisor is replaced.

systemd's user instance runs in namespaces of its own, with the unit's own settings of start, stop, reload, watchdog and
restart. What the unit shuts off (users, folders, system calls) such an instance cannot; `test_deploy` looks at that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SYSTEMD = Path("/usr/lib/systemd/systemd")
UNIT = Path(__file__).parents[2] / "supervisor" / "deploy" / "mqproc.service"
PROGRAM = Path(__file__).with_name("group_program.py")
WATCHDOG_S = 8
# What a user instance can do of the unit, which is all that the supervisor and systemd say to each other.
KEPT = re.compile(
    r"^(Type|NotifyAccess|ExecReload|TimeoutStartSec|TimeoutStopSec|KillMode|Restart\w*|OOMPolicy)=.*$", re.MULTILINE
)
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
kill -STOP "$first"
until_is NRestarts 1
until_is SubState running
[ "$(show MainPID)" != "$first" ] && echo "replaced"
timeout 100 systemctl --user stop mq.service
echo "stopped $(show ActiveState) $(show Result)"
"""


def test_a_real_systemd_starts_reloads_watches_and_stops_a_group(tmp_path: Path) -> None:
    tools = ("unshare", "systemctl")
    if os.geteuid() != 0 or not SYSTEMD.exists() or not all(map(shutil.which, tools)):
        pytest.skip("a systemd of one's own needs root, systemd and unshare")
    kept = "\n".join(found[0] for found in KEPT.finditer(UNIT.read_text()))
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
        "replaced",
        "stopped inactive success",
    ], (done.stdout, done.stderr, (tmp_path / "log").read_text()[-2000:])
