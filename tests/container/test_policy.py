"""`--protect` and `--hide` over the files of a container, and in a container that has a mount with a policy."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from protocol.backends.container.podman.service import Container, PodmanService
from protocol.backends.container.podman.spec import ContainerMount
from tests.container.conftest import MAPPED, MountContainer, StartContainer, inside, shown
from tests.mount.conftest import mounted
from tests.support.policed import (
    HIDDEN,
    HIDDEN_COUNT,
    POLICY,
    PROTECTED,
    RAW_HIDDEN,
    attempts,
    creations,
    error_of,
    fails,
    fill,
    policed,
    state,
)
from tests.support.suites import one_of
from vfsd.client.connection import ControlClient
from vfsd.client.workspace import Workspace
from vfsd.operations.fs import FsExecParams, FsExecResult
from vfsd.wire.messages import wire_path

pytestmark = pytest.mark.fuse


# -- a container's files ------------------------------------------------------------------------------
transport = one_of(["rootfs", "agent"])


@pytest.fixture
def container(start_container: StartContainer, python_image: str) -> Container:
    container = start_container(python_image)
    fill(files_of(container))
    return container


def files_of(container: Container) -> Path:
    """The container's /workspace, by a way that no policy covers."""
    return Path(f"/proc/{shown(container)['State']['Pid']}/root/workspace")


@pytest.fixture
def workspace(mount_container: MountContainer, container: Container, transport: str) -> Workspace:
    return mount_container(container, transport=transport, complaints=["the helper in it is lost"], **POLICY)


@pytest.mark.extended
@pytest.mark.both_engines
def test_no_system_call_changes_what_is_protected_or_makes_what_is_hidden(workspace: Workspace) -> None:
    root = Path(workspace.path)
    for name in HIDDEN:
        fails(errno.ENOENT, (root / name).lstat)
        fails(errno.ENOENT, (root / name).unlink)
    before = state(root)
    assert not {".env", "private", RAW_HIDDEN} & set(before)
    for name in PROTECTED:
        for what, attempt in attempts(root, name).items():
            expected = {"EPERM", "EINVAL"} if what == "RENAME_WHITEOUT" else {"EPERM"}
            assert error_of(attempt) in expected, (what, name)
            (root / "new").unlink(missing_ok=True)
    for name in ("vendor/new", "new.lock", ".env", "empty/.env", "hidden/inside", "private", "envalias", RAW_HIDDEN):
        for what, creation in creations(root, root / name).items():
            assert error_of(creation) == "EPERM", (what, name)
    for name in ("src", "vendor", "hidden"):
        fails(errno.EPERM, lambda name=name: (root / name).rename(root / "moved"))  # type: ignore[misc]
    assert state(root) == before
    denied = [change for change in workspace.log() if change.change == "denied"]
    assert denied
    assert all(change.process is not None and change.process.pid == os.getpid() for change in denied)


@pytest.mark.extended
def test_the_daemon_respects_it_and_programs_in_the_container_do_not(
    workspace: Workspace, container: Container, tmp_path: Path, workdir: Path
) -> None:
    root = Path(workspace.path)
    assert workspace.export(tmp_path / "out.zip").hidden == HIDDEN_COUNT
    workspace.snapshot("kept")
    inside(container, "cd /workspace && echo changed > vendor/lib && echo changed > .env && echo changed > free")
    for dry_run in (True, False):
        with pytest.raises(PermissionError, match=r"vendor/lib.*1 hidden path"):
            workspace.restore("kept", dry_run=dry_run)
    assert inside(container, "cd /workspace && cat vendor/lib .env free") == b"changed\n" * 3
    workspace.restore("kept", ["free"])
    assert (root / "free").read_text() == "free"
    assert not {".env", "private", RAW_HIDDEN} & set(os.listdir(root / ".snapshots/kept"))

    with workspace.fork(workdir / "fork") as fork:
        assert fork.policy() == workspace.policy()
        fails(errno.ENOENT, Path(fork.path, ".env").lstat)
        fails(errno.EPERM, lambda: Path(fork.path, "vendor/lib").write_text("x"))
        assert fork.export(tmp_path / "fork.zip").hidden == HIDDEN_COUNT  # the fork has them
    workspace.policy(protect=["free"], hide=[os.fsdecode(b"sr[b-\xff]"), "hidden/seen"])
    fails(errno.EPERM, lambda: (root / "free").write_text("x"))
    fails(errno.ENOENT, (root / "src").lstat)
    fails(errno.EPERM, (root / "hidden/seen").touch)


@pytest.mark.extended
def test_the_container_of_an_image_is_not_removed_with_what_an_export_lacks(
    mount_container: MountContainer, busybox_image: str, workdir: Path
) -> None:
    workspace = mount_container(None, backend=f"image:{busybox_image}", hide=["private/"], transport="rootfs")
    workspace.executor.run(["sh", "-c", "mkdir private; echo key > private/key; echo seen > seen"])
    command = [sys.executable, "-m", "vfsd.cli.main", "unmount", workspace.name, "--export", workdir / "out.zip"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
    assert "lacks 1 name that the policy hides" in refused.stderr
    assert os.listdir(workspace.path) == ["seen"]
    assert workspace.executor.run(["cat", "private/key"]).stdout == b"key\n"


# -- a container that has the mount -------------------------------------------------------------------
# Each command has to fail with these words.
REFUSED = {
    "Operation not permitted": [
        "echo x > src/secret", "echo x >> alias", "rm top.lock", "mv vendor moved", "mv free top.lock", "mv src moved",
        "chmod 777 vendor/lib", "chown 1 vendor/lib", "touch vendor/lib", "ln top.lock linked", "mkdir vendor/new",
        "echo x > .env", "mkdir .env", "mkdir private", "echo x > private", "ln free private", "ln -s free private",
        "mkfifo envalias", "mkdir envalias", r"""echo x > "$(printf 'fig\351.txt')" """,
        r"""mkdir "$(printf 'r\351serv\351')" """,
    ],
    "No such file or directory": [
        "cat .env", "cat envalias", "cat private/key", "cd private", "rm .env", "mv .env shown",
        r"""cat "$(printf 'r\351serv\351')" """,
    ],
}  # fmt: skip


def check_refused(run: Callable[[str], bytes], root: Path, kinds: Sequence[str] = tuple(REFUSED)) -> None:
    """Assert that each command fails as it should, and that the workspace is as it was."""
    before = state(root)
    commands = [(each, words) for words in kinds for each in REFUSED[words]]
    script = "; ".join(f"sh -c {shlex.quote(command)} 2>&1 | tr '\\n' ' '; echo" for command, _ in commands)
    answers = run(script).splitlines()
    assert len(answers) == len(commands)
    for (command, words), answer in zip(commands, answers, strict=True):
        assert words.encode() in answer, command
    assert run("cat src/secret alias vendor/lib") == b"secretsecretlib"
    assert state(root) == before


@pytest.mark.extended
@pytest.mark.both_engines
def test_a_mount_that_is_bound_into_a_container_holds_its_root(
    engine: str, workdir: Path, start_container: StartContainer
) -> None:
    with policed(f"{engine}-overlay", workdir, allow_other=True) as (workspace, _):
        root = Path(workspace.path)
        root.chmod(0o777)
        bound = (ContainerMount(workspace.path, "/data"),)
        own, mapped = start_container(mounts=bound), start_container(mounts=bound, options=MAPPED)
        try:
            check_refused(lambda script: inside(own, f"cd /data; {script}"), root)
            # Its users are others to the host.
            absent = ["No such file or directory"]
            check_refused(lambda script: inside(mapped, f"cd /data; {script}"), root, absent)
            listed = inside(mapped, r"cd /data; echo mine > made; cat made; printf '%s\n' * .[!.]*").splitlines()
            assert listed[0] == b"mine"
            assert set(listed[1:]) == {os.fsencode(name) for name in os.listdir(root)} | {b".[!.]*"}
        finally:
            own.remove()
            mapped.remove()


@pytest.mark.extended
def test_a_sandbox_is_held(workdir: Path, podman: PodmanService, busybox_image: str) -> None:
    sandbox = {"sandbox": f"image:{busybox_image}", "podman_url": podman.address.url}
    below = workdir / "below"
    below.mkdir()
    fill(below)
    options = {"backend": f"host:{below}", "name": workdir.name, "store": workdir / "store", **sandbox, **POLICY}
    with (
        mounted(workdir / "m", **options) as workspace,
        ControlClient(os.environ["VFSD_RUNTIME_DIR"] + f"/vfsd/{workspace.name}.sock") as client,
    ):

        def run(script: str) -> bytes:
            done = client.call("fs.exec", FsExecParams(argv=["sh", "-c", wire_path(os.fsencode(script))]))
            assert isinstance(done, FsExecResult)
            return bytes(done.stdout)

        check_refused(run, Path(workspace.path))
