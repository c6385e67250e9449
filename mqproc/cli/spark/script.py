"""What spark-submit is given: `spark-submit "$(mqproc spark script)" counts …` counts on a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # A script's folder comes first on the path, and here modules lie that are named as some of Python's own.
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != Path(__file__).resolve().parent]

    from mqproc.cli.main import main

    sys.exit(main(["spark", *sys.argv[1:]]))
