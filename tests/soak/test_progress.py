"""Progress beyond what members have told is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.progress import Worked


def test_progress_is_held_against_what_all_members_have_told(tmp_path: Path) -> None:
    first, second = tmp_path / "member-0.1.report", tmp_path / "member-1.1.report"
    worked = Worked(tmp_path, "member")
    first.write_text("at a 0 0\ndone x\nat a 0 2\nat b")
    worked.check({("a", 0): 1, ("b", 1): 0})
    with pytest.raises(AssertionError, match=r"progress in \('a', 0\) is 3, nobody has had 1"):
        worked.check({("a", 0): 3})
    second.write_text("at a 0 1\nat a 0 1\n")
    first.write_text(first.read_text() + " 1 0\n")
    worked.check({("a", 0): 3, ("b", 1): 1})
    with pytest.raises(AssertionError, match="is 4, nobody has had 3"):
        worked.check({("a", 0): 4})
