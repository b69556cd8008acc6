"""docs/semantics.md is true: every example in it, run on a mount of each engine, says what the page says.

A fenced block of the language "console" is a session: a line that begins with "$ " is a command, what follows is what
it prints on both its outputs.  The blocks of a section share one shell, in a new directory of a workspace that others
may use too.  After "console" may stand the one engine that a block is for, and limits that its workspace has to have.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.differential.known import KNOWN
from tests.mount.conftest import ENGINES, provided
from tests.support.rights import need_root
from tests.support.session_directories import new_directory

PAGE = Path(__file__).parents[2] / "docs" / "semantics.md"
_MARK = "--- end of command {} ---"


@dataclass
class Block:
    """One session: commands, each with what it prints."""

    engines: tuple[str, ...]
    limits: dict[str, int]
    line: int
    commands: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


def sections() -> Iterator[Section]:
    section = Section("")
    block: Block | None = None
    for number, line in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1):
        if block is None:
            if line.startswith("## "):
                yield section
                section = Section(line[3:])
            elif line.startswith("```"):
                kind, *words = line[3:].split()
                assert kind == "console", f"line {number}: a fenced block that nothing runs"
                only = tuple(word for word in words if word in ENGINES)
                limits = {
                    key.replace("-", "_"): int(value) for key, _, value in (w.partition("=") for w in words) if value
                }
                block = Block(only or ENGINES, limits, number)
                section.blocks.append(block)
        elif line == "```":
            block = None
        elif line.startswith("$ "):
            block.commands.append((line[2:], ""))
        else:
            command, printed = block.commands.pop()
            block.commands.append((command, printed + line + "\n"))
    yield section


SECTIONS = [section for section in sections() if section.blocks]
# A session that needs limits gets a workspace of its own.
CASES = [
    pytest.param(section, limits, id=section.title + (" (limited)" if limits else ""))
    for section in SECTIONS
    for limits in ({}, *[block.limits for block in section.blocks if block.limits])
    if any(block.limits == limits for block in section.blocks)
]


@pytest.fixture(scope="module", params=ENGINES)
def served(request: pytest.FixtureRequest, session_dir: str) -> Iterator[tuple[str, Path]]:
    """An engine's name, and a workspace for all sections."""
    with provided(request.param, new_directory(session_dir, f"doc-{request.param}")) as root:
        yield request.param, root


def run(commands: list[str], directory: Path) -> list[str]:
    """What each command prints, in one shell that stands in `directory`."""
    script = "".join(f"{command}\necho {_MARK.format(number)!r}\n" for number, command in enumerate(commands))
    done = subprocess.run(
        ["sh", "-c", f"exec 2>&1\n{script}"],
        stdin=subprocess.DEVNULL,
        cwd=directory,
        stdout=subprocess.PIPE,
        umask=0o022,
        check=False,
        timeout=60,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
    )
    printed = re.sub(r"^sh: \d+: ", "sh: ", done.stdout.decode("utf-8", "surrogateescape"), flags=re.MULTILINE)
    parts = []
    for number in range(len(commands)):
        part, mark, printed = printed.partition(_MARK.format(number) + "\n")
        assert mark, f"the shell ended at {commands[number]!r}: {part}"
        parts.append(part)
    return parts


# Sections whose commands become another user, or set attributes that only root may set.
AS_ROOT = {"Users and permissions", "Privileges", "Extended attributes"}


@pytest.mark.parametrize(("section", "limits"), CASES)
def test_what_the_page_shows_is_what_a_mount_does(
    served: tuple[str, Path], workdir: Path, section: Section, limits: dict[str, int]
) -> None:
    if section.title in AS_ROOT:
        need_root()
    engine, root = served
    blocks = [block for block in section.blocks if engine in block.engines and block.limits == limits]
    commands = [command for block in blocks for command in block.commands]
    if limits:
        (workdir / "limited").mkdir()
        with provided(engine, workdir / "limited", **limits) as place:
            printed = run([command for command, _ in commands], place)
    else:
        place = root / re.sub(r"\W+", "-", section.title)
        place.mkdir()
        printed = run([command for command, _ in commands], place)
    assert list(zip([command for command, _ in commands], printed, strict=True)) == commands


def test_every_difference_from_tmpfs_that_is_let_pass_has_its_section_on_the_page() -> None:
    titles = re.findall(r"^## (.*)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {known.section for known in KNOWN} <= {*titles, "statfs"}


def test_the_list_of_contents_names_the_sections() -> None:
    text = PAGE.read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)", text, re.MULTILINE)
    listed = re.findall(r"^- \[(.*)\]\(#(.*)\)", text, re.MULTILINE)
    assert listed == [(title, re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")) for title in titles]
