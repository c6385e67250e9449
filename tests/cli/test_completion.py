"""Shell completion of commands, options, topics and groups."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two topics and a group; nothing runs on it."""
    config = tmp_path / "store" / "config"
    config.mkdir(parents=True)
    topics = {name: {"topicName": name} for name in ("orders", "orders-again", "payments")}
    (config / "topics.json").write_text(json.dumps({"topicConfigTable": topics}))
    (config / "subscriptionGroup.json").write_text(json.dumps({"subscriptionGroupTable": {"billing": {}}}))
    return tmp_path / "store"


def completed(line: str, **environment: str) -> list[str]:
    """Answer of click to bash for a line whose last word is incomplete."""
    words = line.split(" ")
    asked = {"_MQPROC_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MQPROC_")}
    code = "import sys; sys.argv[0] = 'mqproc'; from mqproc.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean | asked | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return [answer.partition(",")[2] for answer in done.stdout.splitlines() if answer]


def test_completion_offers_names(store: Path) -> None:
    assert completed("mqproc sta") == ["status", "stat"]
    assert completed("mqproc group li") == ["list"]
    assert completed("mqproc doctor --al") == ["--all"]
    assert completed("mqproc restart cq") == ["cq-flusher"]
    assert completed("mqproc up --set max_qu") == ["max_queues="]
    assert completed(f"mqproc --store {store} tail ord") == ["orders", "orders-again"]
    assert completed(f"mqproc tail --store {store} pay") == ["payments"]
    assert completed("mqproc topic info p", MQPROC_STORE=str(store)) == ["payments"]
    assert completed("mqproc group info b", MQPROC_STORE=str(store)) == ["billing"]
    assert completed("mqproc group lag billing --topic ord", MQPROC_STORE=str(store)) == ["orders", "orders-again"]
    assert completed("mqproc replay --to pay", MQPROC_STORE=str(store)) == ["payments"]
    assert completed("mqproc config doc max_qu") == ["max_queues"]
    assert completed("mqproc tail ord") == []
    assert completed(f"mqproc --store {store}/nothing tail ord") == []


@pytest.fixture
def environment(store: Path, tmp_path: Path) -> dict[str, str]:
    """Environment of a shell with `mqproc` as a program, and a store to ask."""
    program = tmp_path / "bin" / "mqproc"
    program.parent.mkdir()
    code = "import sys; sys.argv[0] = 'mqproc'; from mqproc.cli.main import main; sys.exit(main())"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    program.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MQPROC_")}
    path = f"{program.parent}:{os.environ['PATH']}"
    return clean | {"PATH": path, "MQPROC_STORE": str(store), "HOME": str(tmp_path), "TERM": "dumb"}


def shell(name: str, flags: list[str], script: str, environment: dict[str, str]) -> list[str]:
    """Words that a real shell prints."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"there is no {name} here")
    done = subprocess.run(
        [program, *flags, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout, done.stderr
    return done.stdout.split()


def test_bash_completes_a_topic(environment: dict[str, str]) -> None:
    script = """
        eval "$(mqproc completion bash)"
        COMP_WORDS=(mqproc tail ord); COMP_CWORD=2; COMP_LINE="mqproc tail ord"
        _mqproc_completion mqproc
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    assert shell("bash", ["--norc"], script, environment) == ["orders", "orders-again"]


def test_fish_completes_a_topic_and_a_role(environment: dict[str, str]) -> None:
    script = 'mqproc completion fish | source; complete -C "mqproc tail ord"; complete -C "mqproc restart cq"'
    assert shell("fish", ["-N"], script, environment) == ["orders", "orders-again", "cq-flusher"]


def test_zsh_completes_a_topic_and_a_role(environment: dict[str, str]) -> None:
    """zsh shows candidates in its line editor only, which needs a terminal."""
    script = """
        autoload -Uz compinit && compinit -u -D
        eval "$(mqproc completion zsh)"
        [[ ${_comps[mqproc]} == _mqproc_completion ]] || exit 1
        compadd() { print -r -- "${(@)${(P)@[-1]}}" }
        _describe() { print -r -- ${(P)@[-1]} }
        words=(mqproc tail ord) CURRENT=3; _mqproc_completion
        words=(mqproc restart cq) CURRENT=3; _mqproc_completion
    """
    assert shell("zsh", ["-f"], script, environment) == ["orders", "orders-again", "cq-flusher"]
