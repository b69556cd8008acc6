"""The Python examples of docs/store.md and docs/python.md run, and so do the imports of every benchmark."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import bench
from protocol.tools import TOOLS
from tests.support.pages import section


def example(page: str, title: str) -> str:
    (source,) = re.findall(r"```python\n(.*?)```", section(page, title), re.DOTALL)
    return str(source)


def test_the_example_of_the_store_page_takes_and_restores_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFSD_STORE_DIR", str(tmp_path / "store"))
    directory = tmp_path / "x"
    directory.mkdir()
    (directory / "file").write_text("before")
    work = "(directory / 'file').write_text('after')"
    source = (
        example("docs/store.md", "The store").replace("/srv/x", str(directory)).replace("    ...\n", f"    {work}\n")
    )
    assert work in source
    exec(source, {"directory": directory})
    assert (directory / "file").read_text() == "before"


def test_the_example_of_the_tools_page_offers_and_calls_tools(capsys: pytest.CaptureFixture[str]) -> None:
    declared: list[str] = []
    names = {"declare": lambda name, _description, _schema: declared.append(name)}
    exec(example("docs/python.md", "Tools for agents, and `vfsd fs`"), names)
    assert set(declared) == set(TOOLS) - {"shell", "python"}
    assert capsys.readouterr().out == "FileWritten(path='a.txt', bytes_written=2)\n"


def test_the_example_of_the_drafts_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    exec(example("docs/python.md", "Names of the specification's drafts"), {})
    assert capsys.readouterr().out == "15\n1\n1\n"


@pytest.mark.parametrize("module", [found.name for found in pkgutil.iter_modules(bench.__path__)])
def test_every_benchmark_can_be_imported(module: str) -> None:
    importlib.import_module(f"bench.{module}")
