"""Every dotted name of this project exists that docs/architecture.md, another page, or a docstring has in backticks.

Every link from one page to another leads to a file, and to a heading in it.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[3]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), REPOSITORY / "tests/README.md"]
SOURCES = [file for top in ("protocol", "vfsd") for file in (REPOSITORY / top).rglob("*.py")]
# Groups of entry points, and a label of containers.
NO_PYTHON = {"vfsd.backends", "vfsd.engines", "vfsd.workspace"}
_NAME = re.compile(r"`((?:protocol|vfsd)(?:\.\w+)+)`")
_LINK = re.compile(r"\]\(([^)\s:]*)\)")  # not to other sites
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def found(name: str) -> Any:
    """The module, class or function `name`.  ImportError or AttributeError."""
    words = name.split(".")
    value: Any = importlib.import_module(words[0])
    for at, word in enumerate(words[1:], 2):
        if not hasattr(value, word):
            importlib.import_module(".".join(words[:at]))
        value = getattr(value, word)
    return value


def is_there(name: str) -> bool:
    try:
        found(name)
    except AttributeError:
        return False
    except ModuleNotFoundError as error:  # of an extra that is not installed: its names cannot be checked
        return error.name is not None and error.name.partition(".")[0] not in ("protocol", "vfsd")
    return True


def test_every_name_in_backticks_exists() -> None:
    names = {(name, file) for file in PAGES + SOURCES for name in _NAME.findall(file.read_text())}
    assert sum(file.name == "architecture.md" for _, file in names) > 20
    missing = [f"{file.relative_to(REPOSITORY)}: {name}" for name, file in names if not is_there(name)]
    assert sorted(each for each in missing if each.rpartition(" ")[2] not in NO_PYTHON) == []


def anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"\]\(.*?\)", "", heading).lower()).replace(" ", "-")


def test_every_link_between_pages_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page in PAGES:
        for link in _LINK.findall(page.read_text()):
            path, _, fragment = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            is_whole = target.exists() and (
                not fragment or fragment in map(anchor, _HEADING.findall(target.read_text()))
            )
            if not is_whole:
                broken.append(f"{page.relative_to(REPOSITORY)}: {link}")
    assert broken == []
