"""python -m tests.fuzz files|frames|json FIRST:STOP [--folder DIR]"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import click

from tests.fuzz.kinds import KINDS


@click.command()
@click.argument("kind", type=click.Choice(sorted(KINDS)))
@click.argument("seeds")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the files lie; a temporary folder else.")
def main(kind: str, seeds: str, folder: Path | None) -> None:
    """Go through seeds FIRST:STOP of a kind, or one seed; stop at the first that fails."""
    first, _, stop = seeds.partition(":")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mqproc-fuzz-", dir=folder) as place:
        fuzzer = KINDS[kind](Path(place))
        seed = int(first)
        try:
            for seed in range(int(first), int(stop or int(first) + 1)):
                fuzzer.run(seed)
            fuzzer.close()
        except BaseException:
            print(f"repeat: python -m tests.fuzz {kind} {seed}", file=sys.stderr)
            raise
    seconds = time.monotonic() - begin
    print(f"{kind}: {seed + 1 - int(first):,} seeds, {(seed + 1 - int(first)) / seconds:,.0f} a second")


if __name__ == "__main__":
    main()
