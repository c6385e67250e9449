"""python -m tests.soak --minutes 20"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from tests.soak.soak import KILL_EVERY_S, Soak


@click.command()
@click.option("--minutes", type=float, default=20.0, show_default=True)
@click.option(
    "--kill-every", type=float, default=KILL_EVERY_S, show_default=True, help="Seconds between two kills; 0: none."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Decides the order of kills.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the store lies; a temporary folder else.")
def main(minutes: float, kill_every: float, seed: int, folder: Path | None) -> None:
    """Run mixed load and kill roles; fails if a message is lost."""
    with tempfile.TemporaryDirectory(prefix="mqproc-soak-", dir=folder) as place:
        Soak(Path(place), 60 * minutes, kill_every_s=kill_every, seed=seed).run()


if __name__ == "__main__":
    main()
