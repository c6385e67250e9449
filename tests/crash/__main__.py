"""`python -m tests.crash SEED[:STOP]`: stories of these seeds; each that fails prints the line that repeats it."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.crash.planted import PLANTS, plant


def tell(seed: int, images: int, folder: Path) -> tuple[int, int]:
    """One story; (images, messages)."""
    # Here, so that a bug can be planted before the product is imported.
    from tests.crash.program import Story

    place = folder / f"seed{seed}"
    try:
        tally = Story(seed, place, images).run()
        return tally.images, tally.messages
    finally:
        shutil.rmtree(place, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("seeds", help="one seed, or FIRST:STOP")
    parser.add_argument("--images", type=int, default=10, help="images looked at in each crash (default 10)")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where stores are made")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="plant this bug, which some story should notice")
    parser.add_argument("--until-failure", action="store_true", help="stop at the first story that fails")
    arguments = parser.parse_args()
    if arguments.plant:
        plant(arguments.plant)
    first, _, stop = arguments.seeds.partition(":")
    failed = total = 0
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for seed in range(int(first), int(stop or int(first) + 1)):
            try:
                images, _messages = tell(seed, arguments.images, Path(folder))
                total += images
            except Exception:
                failed += 1
                traceback.print_exc()
                planted = f" --plant {arguments.plant!r}" if arguments.plant else ""
                print(f"repeat: python -m tests.crash {seed} --images {arguments.images}{planted}", flush=True)
                if arguments.until_failure:
                    break
    took_s = time.perf_counter() - started
    print(f"{total:,} images, {failed} stories failed, {took_s:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
