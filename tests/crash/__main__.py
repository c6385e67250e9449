"""Stories of crashes: of single seeds, or a whole level of them, and the sweep of failing calls.

python -m tests.crash SEED[:STOP]       stories of these seeds; each that fails prints the line that repeats it
python -m tests.crash --level ci        10,000 images; nightly: 1,000,000, resumable with --progress
python -m tests.crash --sweep           each storage call of a fixed program fails in each way
python -m tests.crash --plants          each planted bug is noticed
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


def tell(seed: int, images: int, folder: Path, journal_path: Path | None) -> int:
    """One story; the images that were looked at."""
    # Here, so that a bug can be planted before the product is imported.
    from tests.crash.disk import Journal
    from tests.crash.story import Story

    place = folder / f"seed{seed}"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        file = stack.enter_context(journal_path.open("w")) if journal_path else None
        return Story(seed, place, images, Journal(file)).run().images


def tell_seeds(arguments: argparse.Namespace, folder: Path) -> int:
    """Stories in this process; how many failed."""
    from tests.crash.levels import prefix

    first, _, stop = arguments.seeds.partition(":")
    failed = total = 0
    started = time.perf_counter()
    for seed in range(int(first), int(stop or int(first) + 1)):
        try:
            total += tell(seed, arguments.images, folder, arguments.journal)
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
    """A level by worker processes; how many of its stories failed."""
    from tests.crash import levels

    progress = levels.run_level(levels.LEVELS[arguments.level], folder, arguments.workers, arguments.progress)
    print(progress.summary(levels.LEVELS[arguments.level]))
    for repeat in progress.failed:
        print(f"repeat: {repeat}")
    return len(progress.failed)


def catch_plants(arguments: argparse.Namespace, folder: Path) -> int:
    """Every planted bug; how many were not noticed."""
    from tests.crash import levels

    return len(levels.catch_all(folder, arguments.workers, arguments.progress))


def sweep(arguments: argparse.Namespace, folder: Path) -> int:
    """The sweep in both ways to flush, or one of them, or one case of it; how many runs failed."""
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
    parser.add_argument("--case", help="of the sweep: one run only, as it was printed")
    parser.add_argument("--plants", action="store_true", help="plant each bug, and tell stories until one notices it")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes of level and sweep"
    )
    parser.add_argument(
        "--progress", type=Path, help="of a level, the sweep or --plants: what is done stands here, and it goes on"
    )
    parser.add_argument("--images", type=int, default=10, help="images looked at in each crash (default 10)")
    parser.add_argument("--folder", type=Path, help="where stores are made (default /dev/shm, where it is there)")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="plant this bug, which some story should notice")
    parser.add_argument("--journal", type=Path, help="write down what happens: a diff shows where two stories part")
    parser.add_argument("--until-failure", action="store_true", help="stop at the first story that fails")
    arguments = parser.parse_args()
    if sum(map(bool, (arguments.seeds, arguments.level, arguments.sweep, arguments.plants))) != 1:
        parser.error("give seeds, or --level, or --sweep, or --plants")
    if arguments.plant:
        plant(arguments.plant)
    where = arguments.folder or (Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    chosen = (
        (arguments.seeds, tell_seeds),
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
