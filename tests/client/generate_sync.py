"""Generator of the synchronous client: `mqproc/client/_sync` from `mqproc/client/_async`.

`python -m tests.client.generate_sync` rewrites the generated files. A source line may have a
generated line of its own:

    self._start(work())  # sync: work()      the generated line is `work()`
    await asyncio.sleep(0)  # async only     there is no generated line, nor for the block after a colon
    # sync: self._lock = Lock()              there is no source line
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "mqproc/client/_async"
TARGET = ROOT / "mqproc/client/_sync"
MODULES = ("client", "consumer", "groups", "handling", "membership", "transactions")

_ASYNC_ONLY = re.compile(r"(.*?)\s*# async only$")
_SYNC = re.compile(r"^( *)(?:.*  )?# sync: (.*)$")
_YIELD_FROM = re.compile(r"for (\w+) in (.+):\n +yield \1\n")
_REPLACEMENTS = [
    (re.compile(pattern), text)
    for pattern, text in (
        (r"\basync (def|with|for)\b", r"\1"),
        (r"\bawait ", ""),
        (r"\bimport asyncio\b", "import threading\nimport time"),
        (r"\basyncio\.sleep\b", "time.sleep"),
        (r"\basyncio\.Event\b", "threading.Event"),
        (r"\bAwaitable\[object\]", "object"),
        (r"\b__a(enter|exit|iter)__\b", r"__\1__"),
        (r"\bMultiplexedConnection\b", "PooledConnection"),
        (r"\b_async\.handling import HandlerTasks\b", "_sync.handler_threads import HandlerThreads"),
        (r"\bHandlerTasks\b", "HandlerThreads"),
        (r"\b_async\.connection\b", "_sync.connection_pool"),
        (r"\b_async\b", "_sync"),
        (r"\bAsync([A-Z]\w*)", r"\1"),
    )
]


def generated(name: str) -> str:
    """Text of a generated module."""
    source = SOURCE / f"{name}.py"
    lines = source.read_text().splitlines()
    text = "\n".join(_sync_lines(lines)) + "\n"
    text = _YIELD_FROM.sub(r"yield from \2\n", text)
    path = f"mqproc/client/_sync/{name}.py"
    text = _ruff(["check", "--fix-only", "--quiet", "--select", "I,F401", "--stdin-filename", path], text)
    text = _ruff(["format", "--quiet", "--stdin-filename", path], text)
    head = f"# Generated from {source.relative_to(ROOT)} by {Path(__file__).relative_to(ROOT)}: do not edit."
    return f"{head}\n{text}"


def _sync_lines(lines: list[str]) -> Iterator[str]:
    skipped = -1  # indentation of the line whose block is skipped
    for line in lines:
        indentation = len(line) - len(line.lstrip())
        if skipped >= 0 and (not line or indentation > skipped):
            continue
        skipped = -1
        if found := _ASYNC_ONLY.match(line):
            skipped = indentation if found[1].endswith(":") else -1
        elif found := _SYNC.match(line):
            yield found[1] + found[2]
        else:
            for pattern, text in _REPLACEMENTS:
                line = pattern.sub(text, line)
            yield line


def _ruff(arguments: list[str], text: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


if __name__ == "__main__":
    for module in MODULES:
        (TARGET / f"{module}.py").write_text(generated(module))
