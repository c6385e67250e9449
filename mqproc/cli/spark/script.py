"""The file for spark-submit: `spark-submit "$(mqproc spark script)" counts …`."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts a script's folder first on the path; modules here must not hide others.
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != Path(__file__).resolve().parent]

    from mqproc.cli.main import main

    sys.exit(main(["spark", *sys.argv[1:]]))
