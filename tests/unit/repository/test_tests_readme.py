"""tests/README.md names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]


def test_every_file_and_folder_that_the_page_names_exists() -> None:
    named = re.findall(r"`([\w/*]+(?:\.py|/))`", (TESTS / "README.md").read_text())
    assert len(named) > 40
    assert [name for name in named if not list(TESTS.glob(name)) and not list(TESTS.rglob(name))] == []
