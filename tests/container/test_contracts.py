"""Containers keep the contracts: of volumes through both transports, of filesystems on the mount of rootfs."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio

from protocol.backends.container.agent.helper_transport import helper_command, helper_program
from protocol.backends.container.podman.exec_stream import ExecStream, open_exec
from protocol.backends.container.podman.service import Container, PodmanService
from protocol.backends.container.reconnecting_volume import ReconnectingVolume
from protocol.backends.container.rootfs import RootfsTransport
from protocol.testing import Clock, FilesystemContract, MakeVolume, StreamingContract
from protocol.volume import Volume
from tests.container.conftest import inside, running_container
from tests.contract import test_host_volume
from tests.support.agents import served
from tests.support.contracts_on_mounts import OnMount
from tests.support.host_directories import HostClock
from tests.support.rights import needs_root
from vfsd.client.workspace import Workspace

pytestmark = [
    needs_root,
    pytest.mark.extended,
]


@pytest.fixture(scope="module")
def container(podman: PodmanService, busybox_image: str) -> Iterator[Container]:
    with running_container(podman, busybox_image, name="contract", options={"privileged": True}) as container:
        yield container


def mount_tmpfs(pid: int, place: str, max_bytes: int | None, max_inodes: int | None) -> None:
    """Mount a tmpfs inside, as the host's root: the container's own may not."""
    limits = [f"size={max_bytes}"] if max_bytes else []
    limits += [f"nr_inodes={max_inodes}"] if max_inodes else []
    options = ",".join(["mode=755", *limits])
    enter = ["nsenter", f"--target={pid}", "--mount"]
    subprocess.run([*enter, "/bin/mkdir", "-p", place], check=True)
    subprocess.run([*enter, "/bin/mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)


class TestVolume(test_host_volume.TestHostVolume):
    """As the host backend's, through /proc/PID/root, and behind the volume that outlives the container's runs."""

    @pytest.fixture
    def volume(self, container: Container, tmp_path: Path) -> Iterator[MakeVolume]:
        state = container.inspect()
        made: list[ReconnectingVolume] = []
        with ExitStack() as stack:

            def make(
                *, max_bytes: int | None = None, max_inodes: int | None = None, clock: Callable[[], int] | None = None
            ) -> Volume:
                place = f"/w/{tmp_path.name}-{len(made)}"
                mount_tmpfs(state.pid, place, max_bytes, max_inodes)
                stack.callback(unmount, state.pid, place)
                transport = RootfsTransport(place)
                transport.probe(state)
                volume = ReconnectingVolume(supports_acl=transport.supports_acl)

                async def connect() -> None:
                    async with trio.open_nursery() as nursery:
                        await volume.connect(await transport.open(state, nursery))
                        nursery.cancel_scope.cancel()

                trio.run(connect)
                stack.callback(trio.run, transport.close)
                made.append(volume)
                return volume

            yield make
            for volume in made:
                volume.check_invariants()

    @pytest.fixture
    def shell_below(self, container: Container, tmp_path: Path) -> Callable[[str], object]:
        return lambda line: inside(container, f"cd /w/{tmp_path.name}-0 && {line}")

    @pytest.fixture
    def clock(self, tmp_path: Path) -> Clock:
        return HostClock(tmp_path / "probe")


def unmount(pid: int, place: str) -> None:
    subprocess.run(["nsenter", f"--target={pid}", "--mount", "/bin/umount", "-l", place], check=True)


# -- filesystems ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["native", "pyfuse3"])
def shared(
    request: pytest.FixtureRequest, container: Container, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """One mount for all tests: some hundred of them need no daemon each."""
    place = tmp_path_factory.mktemp("shared") / "mount"
    backend, url = f"container:{container.name}", container.service.address.url
    name = f"container-contract-{request.param}"
    with Workspace.mount(place, backend, engine=request.param, name=name, podman_url=url, workdir=f"/{name}"):
        yield place


@pytest.mark.fuse
class TestFilesystem(OnMount, FilesystemContract):
    pass


@pytest.mark.fuse
class TestStreaming(OnMount, StreamingContract):
    pass


_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def privileged_container(podman: PodmanService, python_image: str) -> Iterator[Container]:
    """One container for all tests; privileged, because they mount a tmpfs each."""
    with running_container(podman, python_image, name="agent-volumes", options={"privileged": True}) as container:
        yield container


class TestAgentVolumeInAContainer(test_host_volume.TestAgentVolume):
    """The volume over a helper in a real container, over tmpfs inside it.

    The two tests that list thousands of files again and again run over a helper of this machine only: what they show
    is the same.
    """

    test_a_scan_lists_each_lasting_name_once_while_others_come_and_go = None  # type: ignore[assignment]
    test_rm_rf_removes_each_file_while_listing = None  # type: ignore[assignment]

    @pytest.fixture
    def volume(self, privileged_container: Container) -> Iterator[MakeVolume]:  # type: ignore[override]
        with ExitStack() as stack:

            def make(
                *, max_bytes: int | None = None, max_inodes: int | None = None, clock: Callable[[], int] | None = None
            ) -> Volume:
                place = f"/volume{next(_numbers)}"
                options = f"mode=755,size={max_bytes or 1 << 30},nr_inodes={max_inodes or 1_000_000}"
                inside(privileged_container, f"mkdir {place} && mount -t tmpfs -o {options} t {place}")
                program = helper_program(place)

                async def open_stream(_nursery: Any) -> ExecStream:
                    command = helper_command(program)
                    return await open_exec(
                        privileged_container.service, privileged_container.id, command, user="0:0", cwd="/"
                    )

                return stack.enter_context(served(open_stream, program))  # type: ignore[return-value]

            yield make

    @pytest.fixture
    def shell_below(self, privileged_container: Container) -> Callable[[str], object]:
        newest = "/volume$(ls -d /volume* | sed s,/volume,, | sort -n | tail -n 1)"
        return lambda line: inside(privileged_container, f"cd {newest} && {line}")
