"""RemoteFilesystem in a container, over the executor that runs commands there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from protocol import RemoteFilesystem
from protocol.backends.container.exec.runner import ContainerCommandRunner
from protocol.backends.container.podman.service import Container, PodmanService
from protocol.execution.runner import BlockingExecutor
from protocol.testing import FilesystemContract
from tests.container.conftest import inside, running_container

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def container(podman: PodmanService, python_image: str) -> Iterator[Container]:
    with running_container(podman, python_image, name="remote-filesystem") as container:
        inside(container, "mkdir -p /workspace /tmp")
        yield container
        assert inside(container, "ls /tmp") == b"", "a copy of the program is left"


@pytest.fixture
def remote(container: Container) -> Iterator[RemoteFilesystem]:
    directory = f"d{next(_numbers)}"
    inside(container, f"mkdir /workspace/{directory}")
    with RemoteFilesystem(BlockingExecutor(ContainerCommandRunner(lambda: container)), directory) as remote:
        yield remote


@pytest.mark.extended
def test_files_go_into_the_container_and_back(remote: RemoteFilesystem, container: Container) -> None:
    content = bytes(range(256)) * 3000
    remote.write("src/a.py", "print(1)\n# needle\n")
    remote.write_bytes("large", content)

    assert inside(container, f"cd {remote.root} && cat src/a.py && wc -c < large") == b"print(1)\n# needle\n768000\n"
    inside(container, f"echo more >> {remote.root}/src/a.py")
    assert remote.read("src/a.py").total_lines == 3
    assert remote.read_bytes("large").content == content
    assert [match.line_number for match in remote.grep("need.e", glob="*.py")] == [2]
    assert remote.delete("src", recursive=True) == 2


@pytest.mark.long
class TestFilesystem(FilesystemContract):
    @pytest.fixture
    def filesystem(self, remote: RemoteFilesystem) -> RemoteFilesystem:
        return remote
