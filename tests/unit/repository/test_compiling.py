"""The tests are compiled before the workers start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.compiling import compile_tests, stale


@pytest.mark.extended
def test_a_module_is_compiled_once_and_again_when_its_source_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    path, broken = tmp_path / "test_it.py", tmp_path / "test_broken.py"
    path.write_text("def test_it():\n    assert 1 == 1\n")
    broken.write_text("import nothing_of_this_name\n")
    assert stale(tmp_path) == [broken, path]
    compile_tests([broken, path], 2)
    assert stale(tmp_path) == []
    os.utime(next(tmp_path.rglob("test_it*.pyc")), (1, 1))
    assert stale(tmp_path) == [path]
    compile_tests([path], 2)
    assert stale(tmp_path) == []
