"""What has gone well already: whatever begins exactly as that did goes on exactly as that did, and is not run again.

Digests are of all that a check or a life can go by. They lie in a folder that all worker processes share.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import random
from dataclasses import dataclass
from pathlib import Path

from tests.store.recovery.recovering import everything_below


class _WithoutSeed(pickle.Pickler):
    """Pickles without what a seed says next."""

    def persistent_id(self, obj: object) -> str | None:
        return "seed" if isinstance(obj, random.Random) else None


@dataclass(frozen=True, slots=True)
class Seen:
    """Digests of what has gone well, as names in a folder."""

    folder: Path

    def __contains__(self, digest: str) -> bool:
        return (self.folder / digest).exists()

    def add(self, digest: str) -> None:
        """What begins so has gone well to its end."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / digest).touch()


def digest_of(root: Path, what: object, *, without: str = "") -> str:
    """Of all files below `root` but one, and of an object, but for what seeds in it say next."""
    pickled = io.BytesIO()
    _WithoutSeed(pickled).dump(what)
    digest = hashlib.blake2b(pickled.getvalue(), digest_size=20)
    for name, entry in everything_below(root):
        if name == without:
            continue
        digest.update(f"{name} {entry.stat(follow_symlinks=False).st_mode}\0".encode())
        if entry.is_symlink():
            digest.update(os.readlink(entry.path).encode())
        elif entry.is_file():
            data = Path(entry.path).read_bytes()
            digest.update(f"{len(data)} ".encode() + data)
    return digest.hexdigest()
