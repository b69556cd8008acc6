"""The volume over a helper in a real container keeps the contract of protocol.volume, over tmpfs inside it.

The two tests that list thousands of files again and again run over a helper of this machine only
(tests/contract/test_host_volume.py): what they show is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from protocol.backends.container.agent.helper_transport import helper_command, helper_program
from protocol.backends.container.podman.exec_stream import ExecStream, open_exec
from protocol.backends.container.podman.service import Container, PodmanService
from protocol.testing import MakeVolume
from protocol.volume import Volume
from tests.container.conftest import inside, running_container
from tests.contract.test_host_volume import TestAgentVolume as HelperContract
from tests.support.agents import served

pytestmark = pytest.mark.extended

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def container(podman: PodmanService, python_image: str) -> Iterator[Container]:
    """One container for all tests; privileged, because they mount a tmpfs each."""
    with running_container(podman, python_image, name="agent-volumes", options={"privileged": True}) as container:
        yield container


class TestAgentVolumeInAContainer(HelperContract):
    test_a_scan_lists_each_lasting_name_once_while_others_come_and_go = None  # type: ignore[assignment]
    test_rm_rf_removes_each_file_while_listing = None  # type: ignore[assignment]

    @pytest.fixture
    def volume(self, container: Container) -> Iterator[MakeVolume]:  # type: ignore[override]
        with ExitStack() as stack:

            def make(
                *, max_bytes: int | None = None, max_inodes: int | None = None, clock: Callable[[], int] | None = None
            ) -> Volume:
                place = f"/volume{next(_numbers)}"
                options = f"mode=755,size={max_bytes or 1 << 30},nr_inodes={max_inodes or 1_000_000}"
                inside(container, f"mkdir {place} && mount -t tmpfs -o {options} t {place}")
                program = helper_program(place)

                async def open_stream(_nursery: Any) -> ExecStream:
                    command = helper_command(program)
                    return await open_exec(container.service, container.id, command, user="0:0", cwd="/")

                return stack.enter_context(served(open_stream, program))  # type: ignore[return-value]

            yield make

    @pytest.fixture
    def shell_below(self, container: Container) -> Callable[[str], object]:
        newest = "/volume$(ls -d /volume* | sed s,/volume,, | sort -n | tail -n 1)"
        return lambda line: inside(container, f"cd {newest} && {line}")


del HelperContract  # its own tests are where it is
