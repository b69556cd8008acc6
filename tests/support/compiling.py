"""Compile the tests as pytest imports them, with their assertions rewritten: `python -m tests.support.compiling`.

Each worker of `make test` imports every module of the tests.  In a fresh clone all workers would rewrite all modules at
the same time, which took more than half of the CPU time before the first test.  This command does it once, with one
process per CPU, and does nothing if few modules have changed since.

It is also the plugin of these processes: they import the modules and collect no tests.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

__all__ = ["compile_tests", "stale"]

_TESTS: Final = Path(__file__).parents[1]
_FEW: Final = 40  # starting pytest takes longer than rewriting these


def _compiled(path: Path) -> Path:
    """Where pytest keeps the compiled module."""
    name = f"{path.stem}.{sys.implementation.cache_tag}-pytest-{pytest.__version__}.pyc"
    return path.parent / "__pycache__" / name


def stale(directory: Path) -> list[Path]:
    """The test modules below `directory` that pytest has not compiled since they were written."""
    found = []
    for path in sorted([*directory.rglob("test_*.py"), *directory.rglob("conftest.py")]):
        try:
            is_new = _compiled(path).stat().st_mtime >= path.stat().st_mtime
        except FileNotFoundError:
            is_new = False
        if not is_new:
            found.append(path)
    return found


def compile_tests(paths: Sequence[Path], processes: int) -> None:
    """Have pytest import these modules.  A module that cannot be imported is left to the run of the tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", __spec__.name, "-p", "no:cacheprovider"]
    running = [
        subprocess.Popen(
            [*command, *map(str, paths[number::processes])],
            cwd=_TESTS.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for number in range(min(processes, len(paths)))
    ]
    for each in running:
        each.wait()
    for path in paths:  # pytest compares contents: it does not write a file that has only become older than its source
        with contextlib.suppress(FileNotFoundError):
            _compiled(path).touch()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem() -> list[pytest.Item]:
    return []


if __name__ == "__main__" and not sys.dont_write_bytecode:
    changed = stale(_TESTS)
    if len(changed) > _FEW:
        compile_tests(changed, os.cpu_count() or 1)
