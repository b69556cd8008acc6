"""Man pages: one for each command, which groff accepts and which say what the help says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vfsd.cli.main import COMMANDS
from vfsd.cli.man_pages import main, pages

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages()


def rendered(path: Path) -> str:
    command = ["groff", "-man", "-Tutf8", "-Wall", "-P-cbou", "-rLL=100n", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout


def test_the_pages_in_the_repository_are_those_of_the_commands(made: dict[str, str]) -> None:
    kept = {path.name: path.read_text() for path in (REPOSITORY / "docs" / "man").glob("*.1")}
    assert kept == made, "run `make man`"


def test_each_command_and_subcommand_has_a_page(made: dict[str, str]) -> None:
    assert {f"vfsd-{name}.1" for name in COMMANDS} <= made.keys()
    assert {"vfsd.1", "vfsd-fs-read.1", "vfsd-store-list.1"} <= made.keys()


def test_no_line_starts_a_macro_by_accident(made: dict[str, str]) -> None:
    known = {".TH", ".SH", ".TP", ".PP", ".B", ".BR", ".I", ".IR", ".nf", ".fi"}
    for name, text in made.items():
        macros = {line.split()[0] for line in text.splitlines() if line.startswith((".", "'"))}
        assert macros <= known, name


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_renders_every_page_without_a_warning(made: dict[str, str], tmp_path: Path) -> None:
    main(str(tmp_path))
    texts = {name: rendered(tmp_path / name) for name in ("vfsd.1", "vfsd-restore.1", "vfsd-diff.1", "vfsd-fs-read.1")}
    assert "vfsd restore --undo" in texts["vfsd-restore.1"]
    assert "--dry-run" in texts["vfsd-restore.1"]
    assert "\\xNN" in texts["vfsd-diff.1"]
    assert "VFSD_WORKSPACE" in texts["vfsd.1"]


def test_a_page_of_a_command_that_is_gone_is_removed(tmp_path: Path) -> None:
    (tmp_path / "vfsd-gone.1").write_text("old")
    (tmp_path / "other.1").write_text("not ours")
    main(str(tmp_path))
    assert not (tmp_path / "vfsd-gone.1").exists()
    assert (tmp_path / "other.1").exists()
