"""`vfsd prune -w` on running workspaces."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.mount.conftest import MountIt
from tests.support.unmounting import unmount_when_idle
from vfsd.cli.main import cli
from vfsd.client.connection import ControlClient
from vfsd.client.requests import Requests
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.workspaces(engines=["native"])


def run(workspace: Workspace, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["prune", "-w", workspace.name, *arguments])


def answer(workspace: Workspace, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(workspace, *arguments, "--json").stdout)["workspaces"][0]
    return found


def names(workspace: Workspace) -> list[str]:
    return [info.name for info in workspace.snapshots()]


def test_snapshots_in_memory_are_pruned_by_the_same_rules(mount: MountIt) -> None:
    workspace = mount()
    for name in ("one", "two", "three"):
        workspace.snapshot(name, tag="keep it" if name == "one" else None)
    workspace.restore("one")

    shown = answer(workspace, "--keep-last", "1", "--keep-tag", "keep*", "--dry-run")
    assert [each["name"] for each in shown["remove"]] == ["two"]
    assert "two" in names(workspace)
    found = answer(workspace, "--keep-last", "1", "--keep-tag", "keep*")

    assert found == shown
    assert "two" not in names(workspace)
    assert "one" in names(workspace)


def test_the_base_of_a_running_fork_stays_until_the_fork_ends(mount: MountIt, workdir: Path) -> None:
    workspace = mount()
    workspace.snapshot("older")
    workspace.snapshot("base")
    fork = workspace.fork(workdir / "fork", name="fork", snapshot="base")
    workspace.snapshot("newer")
    try:
        found = answer(workspace, "--keep-last", "1")
        assert [(each["name"], each["reasons"]) for each in found["keep"]] == [
            ("newer", ["last snapshot"]),
            ("base", ["base of a fork"]),
        ]
        assert "base" in [each["name"] for each in answer(fork, "--keep-tag", "none")["keep"]]
    finally:
        unmount_when_idle(fork)
    assert names(workspace) == ["base", "newer"]


def test_a_drop_of_what_a_client_has_seen_is_refused_when_that_is_another_snapshot_now(mount: MountIt) -> None:
    workspace = mount()
    workspace.snapshot("one")
    request = Requests(workspace.path, os.getcwd()).drop_unneeded({"one": "2020-01-01T00:00:00.000+00:00"})

    with ControlClient(workspace.socket) as client, pytest.raises(FileNotFoundError):
        client.call(request.method, request.params)
    assert names(workspace) == ["one"]


def test_the_snapshots_of_a_host_directory_are_in_the_store(mount: MountIt, workdir: Path) -> None:
    (workdir / "host").mkdir()
    workspace = mount(backend=f"host:{workdir}/host", store=workdir / "store")
    workspace.snapshot("one")
    workspace.snapshot("two")

    result = run(workspace, "--keep-last", "1")
    assert result.exit_code == 1
    key = f"host:{workdir}/host"
    assert f"vfsd prune ... {key}" in result.stderr

    assert CliRunner().invoke(cli, ["prune", "--keep-last", "1", key, "--store", str(workdir / "store")]).exit_code == 0
    assert names(workspace) == ["two"]
