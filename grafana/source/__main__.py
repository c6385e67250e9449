"""Writes every generated file of `grafana/`: `python -m grafana.source [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

from grafana.source.files import generated_files


def main() -> None:
    """Write into the folder named, or beside the source."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    for name, text in generated_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
