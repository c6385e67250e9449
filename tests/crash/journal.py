"""What happened in a story, in order: two runs of a seed that went the same way have the same digest."""

from __future__ import annotations

import hashlib
from typing import TextIO


class Journal:
    """Lines of a story. Given a `file`, they are written there too: a diff of two shows where runs part."""

    heard = True
    """Whether what is noted goes anywhere."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._file = file

    def note(self, *parts: object) -> None:
        """One thing that happened."""
        line = " ".join(map(str, parts)) + "\n"
        self._hash.update(line.encode())
        if self._file is not None:
            self._file.write(line)

    @property
    def digest(self) -> str:
        """Of everything up to now."""
        return self._hash.hexdigest()


class Unheard(Journal):
    """Where nobody asks for the digest, noting each call is work for nothing."""

    heard = False

    def note(self, *parts: object) -> None:
        """Nothing is kept."""
