"""The command that installs vfsd again, with an extra, as it is installed here."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import vfsd
from vfsd.machine.interpreter import install_command

WHEEL = "/srv/my wheels/vfsd-0.1.0-py3-none-any.whl"
RECORDS = [
    ({"url": "file:///srv/vfsd", "dir_info": {"editable": True}}, ["--editable", "/srv/vfsd[web]"]),
    ({"url": "file:///srv/vfsd", "dir_info": {}}, ["/srv/vfsd[web]"]),
    ({"url": "file:///srv/my%20wheels/vfsd-0.1.0-py3-none-any.whl", "archive_info": {}}, [f"{WHEEL}[web]"]),
    (
        {"url": "ssh://git@git.test/vfsd", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
        ["vfsd[web] @ git+ssh://git@git.test/vfsd@abc"],
    ),
]


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, Any] | None) -> None:
    """Make an installation whose record (PEP 610) is `record`."""
    metadata = tmp_path / "vfsd-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vfsd\nVersion: 0.1.0\n")
    if record is not None:
        (metadata / "direct_url.json").write_text(json.dumps(record))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("record", "words"), RECORDS)
def test_it_names_what_vfsd_was_installed_from(
    record: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, record)
    assert shlex.split(install_command("web")) == [sys.executable, "-m", "pip", "install", *words]


def test_a_checkout_is_named_and_an_installation_from_an_index_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, None)
    checkout = str(Path(vfsd.__file__).parents[1])
    assert shlex.split(install_command())[-2:] == ["--editable", checkout]
    monkeypatch.setattr(vfsd, "__file__", str(tmp_path / "vfsd/__init__.py"))
    assert shlex.split(install_command("web"))[-2:] == ["install", "vfsd[web]"]


@pytest.mark.parametrize(
    ("receipt", "program"),
    [("uv-receipt.toml", ["uv", "tool", "install", "--force"]), ("pipx_metadata.json", ["pipx", "install", "--force"])],
)
def test_it_is_that_of_the_program_that_installed_vfsd(
    receipt: str, program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, RECORDS[2][0])
    (tmp_path / receipt).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert shlex.split(install_command("web")) == [*program, f"{WHEEL}[web]"]


def test_in_an_environment_of_uvx_it_makes_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, RECORDS[2][0])
    monkeypatch.setattr(sys, "prefix", "/home/me/.cache/uv/archive-v0/xscrBxVeMCei")
    assert shlex.split(install_command("web")) == ["uvx", "--from", f"{WHEEL}[web]", "vfsd"]


def test_without_pip_uv_installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, RECORDS[2][0])
    monkeypatch.setattr("vfsd.machine.interpreter.importlib.util.find_spec", lambda _name: None)
    words = ["uv", "pip", "install", "--python", sys.executable, f"{WHEEL}[web]"]
    assert shlex.split(install_command("web")) == words
