"""docs/architecture.md: every dotted name in it exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"
_NAME = re.compile(r"`((?:protocol|vfsd)(?:\.\w+)+)`")


def found(name: str) -> Any:
    """The module, class or function `name`.  ImportError or AttributeError."""
    words = name.split(".")
    value: Any = importlib.import_module(words[0])
    for at, word in enumerate(words[1:], 2):
        if not hasattr(value, word):
            importlib.import_module(".".join(words[:at]))
        value = getattr(value, word)
    return value


def test_every_name_on_the_page_exists() -> None:
    names = _NAME.findall(PAGE.read_text())
    assert len(names) > 20
    missing = []
    for name in names:
        try:
            found(name)
        except (ImportError, AttributeError):
            missing.append(name)
    assert missing == []
