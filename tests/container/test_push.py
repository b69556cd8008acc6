"""`vfsd push` of a container's files, through both transports; the other backends are in `mount/test_push.py`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from protocol.backends.container.podman.service import Container
from tests.container.conftest import MountContainer, inside
from vfsd.cli.main import cli
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.fuse


def numbers_and_ctimes(root: str) -> dict[str, tuple[int, int]]:
    """What git compares of each file."""
    found = {path.name: path.lstat() for path in Path(root).rglob("*")}
    return {name: (seen.st_ino, seen.st_ctime_ns) for name, seen in found.items()}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("transport", "hide"), [("agent", ()), ("rootfs", ()), ("rootfs", ("*.hidden",))], ids=["agent", "rootfs", "policy"]
)
def test_a_container_is_pushed_and_another_machine_starts_with_its_files(
    mount_container: MountContainer, container: Container, workdir: Path, transport: str, hide: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    url = f"file://{workdir}/remote"
    monkeypatch.setenv("XDG_CACHE_HOME", str(workdir / "cache"))
    inside(container, "mkdir -p /workspace && echo x > /workspace/a.hidden")
    if not hide:
        inside(container, "rm /workspace/a.hidden")
    source = mount_container(container, transport=transport, hide=hide)
    Path(source.path, "directory").mkdir()
    Path(source.path, "directory", "file").write_text("in the container")
    os.symlink("directory/file", Path(source.path, "link"))
    expected = numbers_and_ctimes(source.path)

    pushed = CliRunner().invoke(cli, ["push", url, "--as", "one", "-w", source.path, "--json"])
    assert pushed.exit_code == 0, pushed.stderr
    assert json.loads(pushed.stdout)["is_new"]
    monkeypatch.setenv("VFSD_STORE_DIR", str(workdir / "other"))
    assert CliRunner().invoke(cli, ["pull", f"{url}#one"]).exit_code == 0
    with Workspace.mount(workdir / "copy", backend=f"overlay:snapshot:one@{url}") as copy:
        assert Path(copy.path, "link").read_text() == "in the container"
        assert numbers_and_ctimes(copy.path) == expected, "an index of git is not valid any more"
