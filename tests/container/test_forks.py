"""Forks of containers, which go back into them, and `vfsd push` of their files, through both transports."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from protocol.backends.container.podman.service import Container, PodmanService
from tests.container.conftest import MountContainer, inside
from tests.mount.conftest import check_invariants, mounted
from tests.support.unmounting import unmount_when_idle
from tests.support.verbs import check_a_range_is_reverted, check_conflicts_of_forks
from vfsd.cli.main import cli
from vfsd.client.workspace import Workspace

pytestmark = pytest.mark.fuse


def written(root: Path, path: str, content: str) -> None:
    (root / path).write_text(content)


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["agent", "rootfs"])
def test_a_fork_of_a_container_is_merged_into_it(
    mount_container: MountContainer, container: Container, workdir: Path, transport: str
) -> None:
    source = mount_container(container, transport=transport)
    root = Path(source.path)
    (root / "src").mkdir()
    written(root, "src/lines", "".join(f"{number}\n" for number in range(20)))
    written(root, "doomed", "doomed")
    with source.fork(workdir / "copy", name="copy") as copy:
        assert copy.status().forked_from == source.name
        assert sorted(os.listdir(copy.path)) == ["doomed", "src"]
        place = Path(copy.path)
        (place / "src" / "lines").write_text((place / "src" / "lines").read_text().replace("3\n", "three\n", 1))
        written(place, "new", "of the fork")
        os.link(place / "new", place / "again")
        (place / "doomed").unlink()
        inside(container, "sed -i 's/^17$/seventeen/' /workspace/src/lines; echo inside > /workspace/inside")
        done = source.merge(copy)
        assert done.applied
        assert done.conflicts == {}
        lines = inside(container, "cat /workspace/src/lines").decode().split()
        assert (lines[3], lines[17]) == ("three", "seventeen")
        assert inside(container, "ls /workspace").decode().split() == ["again", "inside", "new", "src"]
        assert inside(container, "stat -c %h /workspace/new").strip() == b"2"
        assert copy.merge(source).applied
        assert (place / "inside").read_text() == "inside\n"
        source.undo()
        assert inside(container, "ls /workspace").decode().split() == ["doomed", "inside", "src"]
        check_invariants(copy)
    assert [info.name for info in source.snapshots() if info.kind == "automatic"] == []


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["agent", "rootfs"])
def test_a_range_is_reverted_and_conflicts_of_forks_are_found(
    mount_container: MountContainer, container: Container, workdir: Path, transport: str
) -> None:
    workspace = mount_container(container, transport=transport)
    check_a_range_is_reverted(workspace)
    check_conflicts_of_forks(workspace, workdir)


def test_several_forks_of_a_container_have_one_state(
    mount_container: MountContainer, container: Container, workdir: Path
) -> None:
    source = mount_container(container)
    written(Path(source.path), "file", "before")
    with source.fork(workdir / "first", name="first") as first:
        inside(container, "echo later > /workspace/file")
        with source.fork(workdir / "second", name="second", snapshot=first.status().base) as second:
            assert Path(second.path, "file").read_text() == "before"
            assert not second.merge(first).changes
        assert source.diff(against=first).counts.modified == 1


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["host", "memory"])
def test_a_sandbox_gives_the_fork_a_sandbox_of_its_own(
    podman: PodmanService, busybox_image: str, workdir: Path, backend: str
) -> None:
    (workdir / "directory").mkdir()
    where = "memory" if backend == "memory" else f"host:{workdir}/directory"
    options = {"sandbox": f"image:{busybox_image}", "podman_url": podman.address.url, "engine": "native"}

    def containers(workspace: Workspace) -> set[str]:
        return {state.id for state in podman.labelled({"vfsd.workspace": workspace.name})}

    with mounted(workdir / "m", backend=where, name=workdir.name, **options) as source:
        written(Path(source.path), "file", "before")
        copy = source.fork(workdir / "copy", name=f"{workdir.name}-copy")
        try:
            copy.executor.run(["sh", "-c", "echo changed > /workspace/file"])
            assert Path(copy.path, "file").read_text() == "changed\n"
            assert source.executor.run(["cat", "/workspace/file"]).stdout == b"before"
            assert containers(source)
            assert containers(copy)
            assert not containers(source) & containers(copy)
        finally:
            unmount_when_idle(copy)
        assert containers(copy) == set()
        assert source.executor.run(["cat", "/workspace/file"]).stdout == b"before"


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
