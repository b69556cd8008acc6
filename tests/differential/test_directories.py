"""The differential harness over a directory: a tmpfs must answer through a mount as another one by itself.

`python -m tests.differential --backend overlay --calls 1000000` runs for as long as one likes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.differential.benches import BENCHES, OverlayBench
from tests.differential.calls import Call
from tests.differential.campaign import Campaign
from tests.differential.compare import Bench
from tests.differential.script import parse, script
from tests.support.lower_layers import LAYERS
from tests.support.rights import needs_root
from tests.support.seeds import campaign_seed
from tests.support.suites import one_of

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.timeout(600),
    needs_root,
]

CALLS = 2_000
LONG_CALLS = 100_000
LAYER_CALLS = 1_200  # three mounts


engine = one_of(["native", "pyfuse3"])


@pytest.fixture(params=("host", "overlay"))
def bench(
    request: pytest.FixtureRequest, engine: str, session_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    with BENCHES[request.param](engine, tmp_path_factory.mktemp("diff"), os.environ["VFSD_RUNTIME_DIR"]) as made:
        yield made
        made.check()


def test_random_calls_of_several_users_are_answered_as_tmpfs_answers_them(bench: Bench, runs_long: bool) -> None:
    seed = campaign_seed()
    for finding in Campaign(bench, seed).run(LONG_CALLS if runs_long else CALLS):
        if finding is not None:
            raise AssertionError(f"seed {seed}, {finding.difference}\n{script(finding.calls)}")


@pytest.mark.extended
@pytest.mark.parametrize("layer", LAYERS)
def test_an_archive_or_a_snapshot_below_is_answered_as_tmpfs_answers(
    layer: str, session_dir: str, tmp_path: Path, runs_long: bool
) -> None:
    seed = campaign_seed()
    with BENCHES[layer]("native", tmp_path, os.environ["VFSD_RUNTIME_DIR"]) as bench:
        for finding in Campaign(bench, seed).run(LONG_CALLS if runs_long else LAYER_CALLS):
            if finding is not None:
                raise AssertionError(f"seed {seed}, {finding.difference}\n{script(finding.calls)}")
        bench.check()


class Lopsided(OverlayBench):
    """Makes what comes before "below" in the directory below, and not on the oracle."""

    def _make(self, root: str, calls: Sequence[Call]) -> None:
        if not root.startswith(self.tmpfs):
            super()._make(root, calls)


def test_an_overlay_is_tried_over_what_was_made_below(session_dir: str, tmp_path: Path) -> None:
    with Lopsided("native", tmp_path, os.environ["VFSD_RUNTIME_DIR"]) as bench:
        difference = bench.run(parse("root: mkdir(b'a', 0o777)\nroot: below()\nroot: mkdir(b'a', 0o777)"))
        assert difference is not None
        assert (difference.index, difference.mount, difference.tmpfs) == (2, ("error", "EEXIST"), ("ok", None))
