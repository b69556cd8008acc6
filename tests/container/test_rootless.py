"""Rootless Podman: a plain user with subordinate ids mounts containers and images, and runs commands in sandboxes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.rootless import Rootless, rootless_podman
from tests.container.service import NoPodmanError
from tests.mount.programs import wait_ended
from tests.support.rights import need_root

PYTHON = "localhost/vfsd-test-python:latest"


@pytest.fixture(scope="module")
def user(python_archive: Path, no_leaks_of_the_session: None) -> Iterator[Rootless]:
    """A plain user whose Podman service has an image with Python.  The tests leave no mount and no container."""
    need_root()
    try:
        with rootless_podman() as user:
            shutil.copy(python_archive, user.home / "python.tar")
            user.run("podman", "--url", user.url, "import", "python.tar", PYTHON)
            yield user
            assert json.loads(user.vfsd("list", "--json").stdout) == {"workspaces": []}
            assert user.run("podman", "--url", user.url, "ps", "--all", "--quiet").stdout == ""
    except NoPodmanError as error:
        pytest.skip(f"no rootless Podman can be run here: {error}")


@pytest.fixture
def place(user: Rootless, request: pytest.FixtureRequest) -> Iterator[str]:
    """A mount point, which is also a workspace's name; unmounted after the test."""
    name = f"w{abs(hash(request.node.name)) % 10**6}"
    (user.home / name).mkdir()
    os.chown(user.home / name, user.uid, user.uid)
    yield name
    user.vfsd("-w", name, "unmount", "--discard", check=False)


def shell(user: Rootless, script: str) -> str:
    return user.run("sh", "-ec", script).stdout


def inside(user: Rootless, place: str, script: str, *options: str) -> str:
    return user.vfsd("-w", place, "exec", *options, "--", "sh", "-ec", script).stdout


@pytest.mark.extended
@pytest.mark.fuse
def test_an_image_is_a_workspace_with_commands_and_snapshots(user: Rootless, place: str) -> None:
    user.vfsd("mount", place, "--name", place, "--backend", f"image:{PYTHON}", "--podman-url", user.url)
    assert "agent" in user.vfsd("-w", place, "status").stdout
    shell(user, f"echo outside > {place}/f")

    assert inside(user, place, "cat f; id -u; touch g; chown dev g") == "outside\n0\n"
    # The mount shows users as the container does, apart from its root, which is the user.
    assert shell(user, f"stat -c %u {place}/f {place}/g").split() == [str(user.uid), "1000"]
    user.vfsd("-w", place, "snapshot", "one")
    inside(user, place, "echo changed > f; rm g")
    restored = user.vfsd("-w", place, "restore", "one", check=False)

    assert inside(user, place, "cat f; ls") == "outside\nf\ng\n"
    # Only root may give files away (chown(2)), also through a mount: the restore names the file.
    assert (restored.returncode, "g: owner 1000" in restored.stderr) == (1, True)


@pytest.mark.extended
@pytest.mark.fuse
def test_a_container_of_the_users_is_mounted_by_name(user: Rootless, place: str) -> None:
    podman = ("podman", "--url", user.url)
    user.run(*podman, "run", "--detach", "--network=none", f"--name={place}-c", PYTHON, "sleep", "1000000")
    try:
        user.vfsd("mount", place, "--name", place, "--backend", f"container:{place}-c", "--podman-url", user.url)
        shell(user, f"echo x > {place}/f")
        assert user.run(*podman, "exec", f"{place}-c", "cat", "/workspace/f").stdout == "x\n"
        user.run(*podman, "exec", f"{place}-c", "sh", "-c", "echo y > /workspace/f")
        user.vfsd("-w", place, "unmount")
        assert user.run(*podman, "inspect", "--format={{.State.Running}}", f"{place}-c").stdout == "true\n"
    finally:
        user.run(*podman, "rm", "--force", "--time=0", f"{place}-c")


@pytest.mark.extended
@pytest.mark.fuse
def test_programs_go_on_when_the_daemon_is_killed_and_when_it_is_upgraded(user: Rootless, place: str) -> None:
    user.vfsd("mount", place, "--name", place, "--backend", f"image:{PYTHON}", "--podman-url", user.url)
    status = json.loads(user.vfsd("-w", place, "status", "--json").stdout)
    assert (status["transport"], status["keeper"].partition(" ")[0]) == ("agent", "pid")
    shell(user, f"touch {place}/open")
    script = (
        f"exec 5<>{place}/open; rm {place}/open; echo one >&5; kill -9 {status['pid']}; mkdir {place}/made; "
        "echo two >&5; cat /proc/self/fd/5"
    )
    assert shell(user, script) == "one\ntwo\n"
    user.vfsd("upgrade", place)
    assert inside(user, place, "ls") == "made\n"


@pytest.mark.extended
@pytest.mark.fuse
def test_daemon_and_keeper_are_killed_and_the_next_mount_continues_in_the_container(user: Rootless, place: str) -> None:
    mount = ("mount", place, "--name", place, "--backend", f"image:{PYTHON}", "--podman-url", user.url)
    user.vfsd(*mount)
    shell(user, f"echo work > {place}/f")
    status = json.loads(user.vfsd("-w", place, "status", "--json").stdout)
    assert status["transport"] == "agent"
    processes = int(status["keeper"].split()[1]), status["pid"]
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    for pid in processes:
        wait_ended(pid)
    (name,) = user.run("podman", "--url", user.url, "ps", "--format={{.Names}}").stdout.split()
    findings = user.vfsd("doctor", check=False, CONTAINER_HOST=user.url).stdout
    assert f"{name} has the files of the workspace {place}" in findings

    assert f"continues in the container {name}" in user.vfsd(*mount).stderr

    assert shell(user, f"cat {place}/f; echo more > {place}/g") == "work\n"
    assert inside(user, place, "cat f g") == "work\nmore\n"
    user.vfsd("-w", place, "unmount", "--discard")
    assert user.run("podman", "--url", user.url, "ps", "--all", "--quiet").stdout == ""


@pytest.mark.extended
@pytest.mark.fuse
@pytest.mark.slow
def test_a_sandbox_sees_the_mount_and_leaves_nothing_running(user: Rootless, place: str) -> None:
    user.vfsd("mount", place, "--name", place, "--sandbox", f"image:{PYTHON}", "--podman-url", user.url)
    shell(user, f"echo outside > {place}/f")

    assert inside(user, place, "cat f; id -u; echo inside > g") == "outside\n0\n"
    assert shell(user, f"cat {place}/g; stat -c %u {place}/g").split() == ["inside", str(user.uid)]
    inside(user, place, "setsid sleep 1000001 & exit 0")
    assert "1000001" not in inside(user, place, "ps -o args")
    user.vfsd("-w", place, "snapshot", "one")
    inside(user, place, "rm f g")
    user.vfsd("-w", place, "restore", "one")
    assert inside(user, place, "cat f g") == "outside\ninside\n"


@pytest.mark.extended
@pytest.mark.fuse
def test_rootfs_reaches_what_the_users_own_ids_may_change(user: Rootless, place: str) -> None:
    options = ("--backend", f"image:{PYTHON}", "--podman-url", user.url, "--transport", "rootfs")
    user.vfsd("mount", place, "--name", place, *options, "--workdir", "/root")
    shell(user, f"echo outside > {place}/f")
    assert inside(user, place, "cat f; stat -c %u f") == "outside\n0\n"
    assert shell(user, f"stat -c %u {place}/f").split() == [str(user.uid)]
    user.vfsd("-w", place, "unmount", "--discard")

    refused = user.vfsd("mount", place, "--name", place, *options, "--workdir", "/in/the/images/root", check=False)

    assert refused.returncode == 1
    assert "--transport agent" in refused.stderr
