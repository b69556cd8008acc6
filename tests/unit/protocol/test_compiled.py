"""Which extensions are used: all or none, and none that was made of other sources."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from protocol import compiled
from protocol.compiled import CompiledModules, recorded

MODULE = "protocol.absent_a"
OTHER = "protocol.absent_b"
REPOSITORY = Path(compiled.ROOT)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The record of two sources, which the test may change."""
    monkeypatch.setattr(compiled, "ROOT", str(tmp_path))
    monkeypatch.delenv("VFSD_COMPILED", raising=False)
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("x = 2\n")
    return recorded(["a.py", "b.py"])


def test_an_extension_is_used_whose_sources_are_unchanged(sources: dict[str, str], tmp_path: Path) -> None:
    found = CompiledModules([MODULE, OTHER], sources)
    assert found.check() == (True, "")
    spec = found.find_spec(MODULE)
    assert spec is not None
    assert spec.origin == os.path.join(compiled.FOLDER, "protocol", "absent_a" + EXTENSION_SUFFIXES[0])
    assert found.sources() == [str(tmp_path / name) for name in ("a.py", "b.py")]
    assert found.find_spec("protocol.volume") is None


def test_after_a_change_of_one_source_no_extension_is_used_and_the_source_is_named(
    sources: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "b.py").write_text("x = 3\n")
    found = CompiledModules([MODULE, OTHER], sources)
    assert [found.find_spec(name) for name in (MODULE, OTHER)] == [None, None]
    assert found.check() == (False, "b.py has changed since `make compiled`")
    (tmp_path / "b.py").unlink()
    assert not CompiledModules([MODULE], sources).check()[0]


def test_the_decision_holds_for_the_whole_process(sources: dict[str, str], tmp_path: Path) -> None:
    found = CompiledModules([MODULE, OTHER], sources)
    assert found.find_spec(MODULE) is not None
    (tmp_path / "b.py").write_text("x = 3\n")
    assert found.find_spec(OTHER) is not None


def test_no_extension_is_used_beside_an_imported_source(sources: dict[str, str]) -> None:
    found = CompiledModules(["protocol.compiled", MODULE], sources)
    assert found.find_spec(MODULE) is None
    assert found.check()[1] == "protocol.compiled was imported before `protocol`"


def test_a_variable_turns_extensions_off(sources: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFSD_COMPILED", "0")
    assert CompiledModules([MODULE], sources).check() == (False, "VFSD_COMPILED=0")


@pytest.mark.parametrize(
    "first", ["vfsd.kernel.engines.native.wire", "vfsd.daemon.audit.log", "protocol.backends.memory.state"]
)
def test_whatever_is_imported_first_all_modules_are_compiled_or_none(first: str) -> None:
    script = (
        f"import {first}, sys, vfsd.kernel.engines.native, vfsd.daemon.audit.log, protocol.backends.memory;"
        "from protocol import compiled;"
        "print({sys.modules[name].__file__.endswith('.so') for name in %r}, compiled.build()[0])"
        % [first, "vfsd.kernel.engines.native.session", "protocol.directory_cookies", "vfsd.daemon.audit.processes"]
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout in {"{True} compiled\n", "{False} interpreted\n"}
