"""Crash stories of seeds or of a level, the sweep of failing calls, and planted bugs.

python -m tests.crash SEED[:STOP]       stories of these seeds; a failure prints the command that repeats it
python -m tests.crash --level ci        10,000 images; nightly: 1,000,000, resumable with --progress
python -m tests.crash --sweep           each storage call of a fixed program fails in each way
python -m tests.crash --plants          each planted bug is caught
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.crash.planted import PLANTS, plant
from tests.support.processes import EXIT_INTERRUPTED

BOTH = "both"


def run_story(seed: int, images: int, folder: Path, journal_path: Path | None) -> int:
    """Run one story; the number of images checked."""
    # Imported here so that bugs can be planted first.
    from tests.crash.disk import Journal
    from tests.crash.story import Story

    place = folder / f"seed{seed}"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        file = stack.enter_context(journal_path.open("w")) if journal_path else None
        return Story(seed, place, images, Journal(file)).run().images


def run_seeds(arguments: argparse.Namespace, folder: Path) -> int:
    """Run stories in this process; how many failed."""
    from tests.crash.levels import prefix

    first, _, stop = arguments.seeds.partition(":")
    failed = total = 0
    started = time.perf_counter()
    for seed in range(int(first), int(stop or int(first) + 1)):
        try:
            total += run_story(seed, arguments.images, folder, arguments.journal)
        except Exception:
            failed += 1
            traceback.print_exc()
            planted = f' --plant "{arguments.plant}"' if arguments.plant else ""
            print(f"repeat: {prefix()}python -m tests.crash {seed} --images {arguments.images}{planted}", flush=True)
            if arguments.until_failure:
                break
    print(f"{total:,} images, {failed} stories failed, {time.perf_counter() - started:.1f} s")
    return failed


def run_level(arguments: argparse.Namespace, folder: Path) -> int:
    """Run a level with worker processes; how many stories failed."""
    from tests.crash import levels

    progress = levels.run_level(levels.LEVELS[arguments.level], folder, arguments.workers, arguments.progress)
    print(progress.summary(levels.LEVELS[arguments.level]))
    for repeat in progress.failed:
        print(f"repeat: {repeat}")
    return len(progress.failed)


def catch_plants(arguments: argparse.Namespace, folder: Path) -> int:
    """Try every planted bug; how many were not caught."""
    from tests.crash import levels

    return len(levels.catch_all(folder, arguments.workers, arguments.progress))


def sweep(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the sweep with both flush modes, one of them, or one case; how many runs failed."""
    from mqproc.config.options import FlushDiskType
    from tests.crash import levels
    from tests.crash.levels import Whole, case_of

    flushes = [flush for flush in FlushDiskType if arguments.sweep in (BOTH, flush.value)]
    if arguments.case:
        whole = Whole(folder / "whole", flushes[0])
        whole.run(folder / "case", case_of(arguments.case, whole.calls))
        return 0
    done = [levels.run_sweep(flush, folder, arguments.workers, arguments.progress) for flush in flushes]
    return len({repeat for swept in done for repeat in swept.failed})


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.crash", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", nargs="?", help="one seed, or FIRST:STOP")
    parser.add_argument("--level", choices=("ci", "nightly", "twins-ci", "twins-nightly"))
    parser.add_argument("--sweep", nargs="?", const=BOTH, choices=(BOTH, "ASYNC_FLUSH", "SYNC_FLUSH"))
    parser.add_argument("--case", help="with --sweep: run this case only, as printed")
    parser.add_argument("--plants", action="store_true", help="plant each bug, and run stories until one catches it")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes of level and sweep"
    )
    parser.add_argument(
        "--progress", type=Path, help="with --level, --sweep or --plants: save progress in this file, and resume"
    )
    parser.add_argument("--images", type=int, default=10, help="images checked per crash (default 10)")
    parser.add_argument("--folder", type=Path, help="folder for stores (default /dev/shm if it exists)")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="plant this bug, which some story should catch")
    parser.add_argument("--journal", type=Path, help="log all events here: diff shows where two stories diverge")
    parser.add_argument("--until-failure", action="store_true", help="stop at the first story that fails")
    arguments = parser.parse_args()
    if sum(map(bool, (arguments.seeds, arguments.level, arguments.sweep, arguments.plants))) != 1:
        parser.error("give seeds, or --level, or --sweep, or --plants")
    if arguments.plant:
        plant(arguments.plant)
    where = arguments.folder or (Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    chosen = (
        (arguments.seeds, run_seeds),
        (arguments.level, run_level),
        (arguments.plants, catch_plants),
        (arguments.sweep, sweep),
    )
    work = next(work for asked, work in chosen if asked)
    try:
        with tempfile.TemporaryDirectory(dir=where) as folder:
            return 1 if work(arguments, Path(folder)) else 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
