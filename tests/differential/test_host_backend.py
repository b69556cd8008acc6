"""The differential harness over a host directory: a tmpfs must answer through a mount as another one by itself."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Iterator

import pytest

from tests.differential.calls import Call
from tests.differential.campaign import Campaign
from tests.differential.compare import MAX_BYTES, Bench
from tests.differential.known import Difference
from tests.differential.script import script
from vfsd.workspace import Workspace

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a tmpfs, and works as several users"),
]

CALLS = 20_000


class HostBench(Bench):
    """Beside the oracle, a mount of a host directory that is a tmpfs too."""

    def _mount_vfsd(self, stack: contextlib.ExitStack) -> str:
        under, place = self._directory / "under", self._directory / "vfsd"
        for directory in (under, place):
            directory.mkdir()
        options = f"nosuid,nodev,mode=755,nr_inodes=1000000,size={MAX_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "under", str(under)], check=True)
        stack.callback(subprocess.run, ["umount", "-l", str(under)], check=True)
        name = f"diff-host-{self._directory.name}-{os.getpid()}"
        self.workspace = stack.enter_context(
            Workspace.mount(place, f"host:{under}", engine=self.engine, name=name, allow_other=True)  # type: ignore[arg-type]
        )
        return str(place)

    def _unknown(self, call: Call, difference: Difference) -> bool:
        return not _is_a_matter_of_clocks(difference) and super()._unknown(call, difference)


def _is_a_matter_of_clocks(difference: Difference) -> bool:
    """What a root daemon makes it gives to the caller afterwards: its ctime is a little later than its mtime.

    And tmpfs's clock ticks every 4 ms for an inode that nobody has looked at since it changed last, as those
    of the directory below the mount: two changes look like one then (fs/inode.c, current_time).
    """
    if "order of times" in difference.what:
        return True
    return "time" in difference.what and {difference.tmpfs, difference.mount} == {"now", "same"}


@pytest.fixture(params=("native", "pyfuse3"))
def bench(
    request: pytest.FixtureRequest, session_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    with HostBench(request.param, tmp_path_factory.mktemp("diff"), os.environ["VFSD_RUNTIME_DIR"]) as made:
        yield made
        made.check()


def test_random_calls_of_several_users_are_answered_as_tmpfs_answers_them(bench: Bench) -> None:
    seed = random.SystemRandom().randrange(2**32)
    for finding in Campaign(bench, seed).run(CALLS):
        if finding is not None:
            raise AssertionError(f"seed {seed}, {finding.difference}\n{script(finding.calls)}")
