"""The fork server notices that its installation changed."""

from __future__ import annotations

import os
import sys
import time
import types
from pathlib import Path

import pytest

from vfsd.daemon.keeper.fork_server import LoadedFiles
from vfsd.daemon.keeper.keeping import ANSWERED, SERVING_NS, deaths_in_a_row, shared_memory

LATER_NS = time.time_ns() + 10**15  # later than this run


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a loaded module of vfsd."""
    path = tmp_path / "example.py"
    path.write_text("x = 1\n")
    module = types.ModuleType("vfsd.example")
    module.__file__ = str(path)
    # Other tests leave modules of files that are gone.
    there = {name: each for name, each in sys.modules.items() if os.path.exists(getattr(each, "__file__", None) or "/")}
    monkeypatch.setattr(sys, "modules", {**there, "vfsd.example": module})
    return path


def test_an_installation_without_changes_is_unchanged(module_file: Path) -> None:
    assert module_file.exists()
    assert not LoadedFiles(LATER_NS).changed()


def test_a_changed_or_removed_module_is_a_change(module_file: Path) -> None:
    files = LoadedFiles(LATER_NS)
    os.utime(module_file, ns=(0, 0))
    assert files.changed()
    files = LoadedFiles(LATER_NS)
    assert not files.changed()
    module_file.unlink()
    assert files.changed()


def test_a_module_that_changed_during_the_imports_is_a_change(module_file: Path) -> None:
    started_ns = module_file.stat().st_mtime_ns
    assert LoadedFiles(started_ns).changed()


@pytest.mark.parametrize(
    ("answered", "served_s", "deaths"),
    [(0, None, 4), (0, 1, 4), (1, 1, 0), (0, 61, 0)],
    ids=["it never served", "it answered nothing", "it answered something", "nobody used it"],
)
def test_a_daemon_that_did_its_work_ends_a_row_of_deaths(answered: int, served_s: int | None, deaths: int) -> None:
    _, memory = shared_memory()
    memory[ANSWERED] = answered
    if served_s is not None:
        memory[SERVING_NS] = max(1, time.monotonic_ns() - served_s * 10**9)
    assert deaths_in_a_row(memory, 3) == deaths
    assert deaths_in_a_row(memory, deaths) == deaths + 1  # of the next daemon, which did nothing yet
