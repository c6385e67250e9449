"""Write every generated file of `grafana/`: `python -m grafana.source [FOLDER]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from grafana.source.files import generated_files


def main() -> None:
    """Write to the named folder, or to the parent of the source."""
    parser = argparse.ArgumentParser("python -m grafana.source", description="Write every generated file of grafana/.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1])
    folder: Path = parser.parse_args().folder
    for name, text in generated_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
