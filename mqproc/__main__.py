"""`python -m mqproc`."""

from __future__ import annotations

import sys

from mqproc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
