"""Sections of the documentation, whose examples tests run."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def section(page: str, title: str) -> str:
    """The text below a heading, up to the next one that is not below it."""
    lines = (REPOSITORY / page).read_text(encoding="utf-8").splitlines(keepends=True)
    level, found = 0, list[str]()
    is_code = False
    for line in lines:
        is_code ^= line.startswith("```")
        heading = None if is_code else re.fullmatch(r"(#+) (.*)\n", line)
        if heading and level and len(heading[1]) <= level:
            break
        if level:
            found.append(line)
        elif heading and heading[2] == title:
            level = len(heading[1])
    assert level, f"{page} has no section {title!r}"
    return "".join(found)
