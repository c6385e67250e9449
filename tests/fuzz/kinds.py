"""What can be fuzzed, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from tests.fuzz.files import Files
from tests.fuzz.frames import Frames
from tests.fuzz.json_files import JsonFiles
from tests.fuzz.records import Records
from tests.fuzz.shared_files import SharedFiles


class Fuzzer(Protocol):
    """One kind, in a folder that it may use."""

    def run(self, seed: int) -> None:
        """Do what the seed says. Raises what breaks a rule."""
        ...

    def close(self) -> str:
        """Check what can be checked at the end only; what the seeds have reached, where chance decides that."""
        ...


KINDS: Final[dict[str, Callable[[Path], Fuzzer]]] = {
    "files": Files,
    "frames": Frames,
    "json": JsonFiles,
    "records": Records,
    "shared": SharedFiles,
}
