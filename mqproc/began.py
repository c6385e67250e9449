"""When this process began to import the package: what it imports later may be of another version by then."""

from __future__ import annotations

import time
from typing import Final

IMPORTED_NS: Final = time.time_ns()
"""Unix time in ns. `mqproc` imports this module before all others."""
