"""Outages of a real group: kills, power cuts, failing calls, a full disk, a failing disk.

python -m tests.outages kills 0:10         stories of these seeds; a failure prints the command that repeats it
python -m tests.outages --level ci         65 kills, 20 cuts and some of each other kind; nightly: 1,000 and 500
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.outages import rig
from tests.outages.stories import KINDS, LEVELS, Progress, run
from tests.support.processes import EXIT_INTERRUPTED


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.outages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", nargs="?", choices=sorted(KINDS))
    parser.add_argument("seeds", nargs="?", help="one seed, or FIRST:STOP")
    parser.add_argument("--level", choices=sorted(LEVELS))
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="stories run in parallel")
    parser.add_argument("--progress", type=Path, help="with --level: save progress in this file, and resume from it")
    parser.add_argument("--folder", type=Path, help="folder for stores and disk images (default /dev/shm if writable)")
    arguments = parser.parse_args()
    if bool(arguments.level) == bool(arguments.kind) or bool(arguments.kind) != bool(arguments.seeds):
        parser.error("give a kind and seeds, or --level")
    if arguments.level:
        seeds = LEVELS[arguments.level]
    else:
        first, _, stop = arguments.seeds.partition(":")
        seeds = {arguments.kind: range(int(first), int(stop or int(first) + 1))}
    where = arguments.folder or (Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None)
    try:
        with tempfile.TemporaryDirectory(prefix="mqproc-outages-", dir=where) as folder:
            progress = run(seeds, Path(folder), arguments.workers, Progress(arguments.progress))
            left = [str(path) for path in Path(folder).iterdir()] + rig.remaining_of(Path(folder))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print(progress.summary())
    for line in left:
        print(f"not removed: {line}")
    return 1 if progress.failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
