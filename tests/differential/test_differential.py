"""The differential harness: that a mount answers as tmpfs does, on each engine, and that the harness would notice.

`python -m tests.differential --calls 1000000 --engine native` runs for as long as one likes.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.differential import known
from tests.differential.benches import BENCHES, OverlayBench
from tests.differential.calls import OPERATIONS, WORKERS, Call, random_calls
from tests.differential.campaign import Campaign, reduced
from tests.differential.compare import Bench, mount_flags
from tests.differential.script import parse, reduce, script
from tests.support.lower_layers import LAYERS
from tests.support.rights import needs_root
from tests.support.seeds import campaign_seed
from tests.support.suites import one_of

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.timeout(600),
    needs_root,
]

CALLS = 8_000
LONG_CALLS = 1_000_000


@pytest.fixture(scope="module", params=("native", "pyfuse3", "native-writeback"))
def bench(
    request: pytest.FixtureRequest, session_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    engine, _, cached = request.param.partition("-")
    place, cache = tmp_path_factory.mktemp("diff"), "writeback" if cached else "writethrough"
    with Bench(engine, place, os.environ["VFSD_RUNTIME_DIR"], cache=cache) as made:  # type: ignore[arg-type]
        yield made
        made.check()


def test_both_are_mounted_alike(bench: Bench) -> None:
    assert mount_flags(bench.tmpfs) == mount_flags(bench.mount)


# -- the mount answers as tmpfs does ---------------------------------------------------------------


def campaign(bench: Bench, calls: int) -> None:
    seed = campaign_seed()
    for finding in Campaign(bench, seed).run(calls):
        if finding is not None:
            raise AssertionError(f"seed {seed}, {finding.difference}\n{script(finding.calls)}")


@pytest.mark.slow
def test_random_calls_of_several_users_are_answered_as_tmpfs_answers_them(bench: Bench) -> None:
    campaign(bench, CALLS)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_calls_are_answered_as_tmpfs_answers_them(bench: Bench) -> None:
    campaign(bench, LONG_CALLS)


def sequences(without: frozenset[str]) -> st.SearchStrategy[list[Call]]:
    """Sequences of calls that shrink: fewer ones, plainer arguments, root."""
    each = [
        st.builds(
            Call,
            st.sampled_from(range(len(WORKERS))),
            st.just(name),
            st.tuples(*(st.sampled_from(kind.values) for kind in operation.kinds)),
        )
        for name, operation in OPERATIONS.items()
        if name not in without
    ]
    return st.lists(st.one_of(each), min_size=1, max_size=60)


@pytest.mark.parametrize("engine", ["native", "pyfuse3"])
def test_sequences_that_hypothesis_makes_are_answered_as_tmpfs_answers_them(
    engine: str, tmp_path: Path, session_dir: str
) -> None:
    with Bench(engine, tmp_path, os.environ["VFSD_RUNTIME_DIR"]) as bench:

        @settings(report_multiple_bugs=False)
        @given(sequences(bench.without))
        def answers_alike(calls: list[Call]) -> None:
            difference = bench.run(calls, tree_every=10)
            if difference is not None and difference.may_pass:
                difference = bench.run(calls, tree_every=10)
            if difference is not None:
                note(script(calls))
                raise AssertionError(str(difference))

        answers_alike()
        bench.check()


# -- what is known to differ still does, and nothing more ------------------------------------------

EXAMPLES = {
    "_seek_in_directory": "root: open(b'/', 0x0, 0o0, 0)\nroot: lseek(0, 0, 2)",
    "_failed_fallocate": "1001: open(b'a', 0x42, 0o6777, 0)\n1001: fallocate(0, 16, 0, 4096)",
    "_group_id_without_execute": (
        "1001: open(b'a', 0x42, 0o666, 0)\nroot: lchown(b'a', -1, 0)\nroot: chmod(b'a', 0o2666)\n1001: write(0, (0, 1))"
    ),
    "_chown_nothing": "root: open(b'a', 0x42, 0o2644, 0)\n1001: chown(b'a', -1, -1)",
    "_removed_acl": (
        "root: open(b'a', 0x42, 0o777, 0)\nroot: lchown(b'a', 1001, -1)\nroot: chmod(b'a', 0o2755)\n"
        "1001: remove_acl(b'a', b'system.posix_acl_access')"
    ),
    "_fifo_times": (
        "root: mknod(b'a', 0o10666, 0)\nroot: utimens(b'a', (0, 0), (0, 0), 1)\n"
        "root: open(b'a', 0x2, 0o0, 0)\nroot: write(0, (0, 1))"
    ),
    "_symlink_pages": f"root: symlink({b't' * 128!r}, b'a')",
    "_capability_and_set_id": (
        "root: open(b'a', 0x42, 0o777, 0)\nroot: chmod(b'a', 0o4777)\n"
        f"root: fsetxattr(0, b'security.capability', {bytes.fromhex('0100000200040000') + bytes(12)!r}, 0)\n"
        "root: write(0, (0, 1))"
    ),
    "_hole_of_the_last_page": (
        f"root: open(b'a', 0x42, 0o666, 0)\nroot: pwrite(0, (0, 1), {2**63 - 2})\nroot: lseek(0, {2**63 - 2}, 4)"
    ),
    "_data_of_the_last_page": (
        f"root: open(b'a', 0x42, 0o666, 0)\nroot: pwrite(0, (0, 1), {2**63 - 2})\nroot: seek_sparse(0, 0, 3)"
    ),
    "_seeks_hole": "root: open(b'a', 0x42, 0o666, 0)\nroot: ftruncate(0, 8192)\nroot: lseek(0, 0, 3)",
    "_mapped_write": (
        "1001: open(b'a', 0x42, 0o777, 0)\n1001: write(0, (0, 100))\nroot: chmod(b'a', 0o4777)\n"
        "1001: map_write(0, 0, (0, 1))"
    ),
    "_times_of_failed_fallocate": (
        "root: open(b'a', 0x42, 0o666, 0)\nroot: utimens(b'a', (0, 0), (0, 0), 1)\nroot: fallocate(0, 16, 0, 4096)"
    ),
    "_truncated_to_its_size": "root: open(b'a', 0x42, 0o666, 0)\nroot: write(0, (0, 100))\nroot: truncate(b'a', 100)",
    "_both_flags": "root: open(b'a', 0x42, 0o666, 0)\nroot: setxattr(b'a', b'user.a', b'1', 3, 1)",
    # Of clocks and of requests in the background: there is no sequence that always shows them.
    "_coarse_clock": None,
    "_late_read": None,
    "_touched": None,
}


@pytest.mark.parametrize("entry", known.KNOWN, ids=lambda entry: entry.matches.__name__)
def test_a_known_difference_is_one(bench: Bench, entry: known.Known) -> None:
    example = EXAMPLES[entry.matches.__name__]
    if example is None or bench.engine not in entry.engines or bench.cache not in entry.caches:
        return
    before = bench.seen.get(entry, 0)
    assert bench.run(parse(example)) is None
    assert bench.seen.get(entry, 0) > before, "there is no difference any more: take it out of the table"


FOUND = {
    "a page allocated twice is data": (
        "root: open(b'a', 0x42, 0o666, 0)\nroot: fallocate(0, 0, 0, 8192)\n"
        "root: fallocate(0, 0, 4096, 100000)\nroot: seek_sparse(0, 0, 3)\nroot: seek_sparse(0, 4096, 4)"
    ),
    "data that was not written back is no hole": (
        "root: open(b'a', 0x42, 0o666, 0)\nroot: pwrite(0, (1, 10), 0)\nroot: seek_sparse(0, 0, 3)"
    ),
    "a truncation to the same size that clears suid": (
        "1001: open(b'a', 0x42, 0o777, 0)\nroot: truncate(b'a', 8192)\nroot: chmod(b'a', 0o6711)\n"
        "1001: truncate(b'a', 8192)"
    ),
}


@pytest.mark.parametrize("lines", FOUND.values(), ids=FOUND)
def test_what_random_calls_found_once_is_no_difference_any_more(bench: Bench, lines: str) -> None:
    calls = parse(lines)
    if not any(call.operation in bench.without for call in calls):
        assert bench.run(calls, tree_every=1) is None


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("root: tmpfile(b'.', 0x410002, 0o666, 1)", "ENOTSUP"),
        ("root: fallocate(0, 0, 0, 4096)", "ENOTSUP"),
        ("root: seek_sparse(0, 0, 4)", 8192),
    ],
)
def test_what_pyfuse3_cannot_carry_says_so(bench: Bench, line: str, answer: object) -> None:
    if bench.engine != "pyfuse3":
        return
    first = "root: open(b'a', 0x42, 0o666, 0)\nroot: ftruncate(0, 8192)\n"
    difference = bench.run(parse(first + line))
    assert difference is not None
    assert difference.what == "answer"
    said = difference.mount[1]  # type: ignore[index]
    assert (said if isinstance(said, str) else said[0]) == answer


# -- the harness notices, and reduces --------------------------------------------------------------


class Unequal(Bench):
    """A bench on which a file of the same size has other content in the mount than in tmpfs."""

    @contextlib.contextmanager
    def _roots(self) -> Iterator[list[str]]:
        with super()._roots() as roots:
            for root, content in zip(roots, (b"text", b"tent"), strict=True):
                with open(os.path.join(root, "a"), "wb") as file:
                    file.write(content)
            yield roots


@pytest.fixture
def unequal(tmp_path: Path, session_dir: str) -> Iterator[Bench]:
    with Unequal("native", tmp_path, os.environ["VFSD_RUNTIME_DIR"]) as bench:
        yield bench


def test_a_difference_is_found_and_reduced_to_the_calls_that_show_it(unequal: Bench) -> None:
    noise = [Call(0, "umask", (0o22,)), Call(2, "stat", (b"a",)), Call(1, "getcwd", ())]
    calls = [*noise, Call(2, "open", (b"a", os.O_RDONLY, 0, 1)), *noise, Call(2, "read", (1, 100)), *noise]
    difference = unequal.run(calls)
    assert difference is not None
    assert (difference.index, difference.what) == (7, "answer")
    assert (difference.tmpfs, difference.mount) == (("ok", b"text"), ("ok", b"tent"))
    small = reduced(unequal, calls, difference)
    assert small is not None
    assert [call.operation for call in small[1]] == ["open", "read"]


def test_a_difference_that_no_call_touches_is_found_in_the_tree(unequal: Bench) -> None:
    difference = unequal.run([Call(0, "umask", (0,))])
    assert difference is not None
    assert (difference.operation, difference.what) == ("tree", "b'/a': content")


def test_a_script_says_all_of_its_calls() -> None:
    calls = list(random_calls(random.Random(1), 2000))
    assert parse(script(calls)) == calls


def test_reduction_leaves_what_is_needed_and_nothing_else() -> None:
    needed = [Call(0, "mkdir", (b"a", 0o777)), Call(0, "rmdir", (b"b",))]

    def fails(part: Sequence[Call]) -> bool:
        return [call for call in part if call.operation in {"mkdir", "rmdir"}][-2:] == needed

    calls = [call for call in random_calls(random.Random(2), 50) if call.operation not in {"mkdir", "rmdir"}]
    assert reduce([*calls, needed[0], *calls, needed[1], *calls], fails) == needed


DIRECTORY_CALLS = 2_000
LONG_DIRECTORY_CALLS = 100_000
LAYER_CALLS = 1_200  # three mounts


engine = one_of(["native", "pyfuse3"])


@pytest.fixture(params=("host", "overlay"))
def directory_bench(
    request: pytest.FixtureRequest, engine: str, session_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    with BENCHES[request.param](engine, tmp_path_factory.mktemp("diff"), os.environ["VFSD_RUNTIME_DIR"]) as made:
        yield made
        made.check()


def test_random_calls_on_other_backends_are_answered_as_tmpfs_answers_them(
    directory_bench: Bench, runs_long: bool
) -> None:
    seed = campaign_seed()
    for finding in Campaign(directory_bench, seed).run(LONG_DIRECTORY_CALLS if runs_long else DIRECTORY_CALLS):
        if finding is not None:
            raise AssertionError(f"seed {seed}, {finding.difference}\n{script(finding.calls)}")


@pytest.mark.extended
@pytest.mark.parametrize("layer", LAYERS)
def test_an_archive_or_a_snapshot_below_is_answered_as_tmpfs_answers(
    layer: str, session_dir: str, tmp_path: Path, runs_long: bool
) -> None:
    seed = campaign_seed()
    with BENCHES[layer]("native", tmp_path, os.environ["VFSD_RUNTIME_DIR"]) as directory_bench:
        for finding in Campaign(directory_bench, seed).run(LONG_DIRECTORY_CALLS if runs_long else LAYER_CALLS):
            if finding is not None:
                raise AssertionError(f"seed {seed}, {finding.difference}\n{script(finding.calls)}")
        directory_bench.check()


class Lopsided(OverlayBench):
    """Makes what comes before "below" in the directory below, and not on the oracle."""

    def _make(self, root: str, calls: Sequence[Call]) -> None:
        if not root.startswith(self.tmpfs):
            super()._make(root, calls)


def test_an_overlay_is_tried_over_what_was_made_below(session_dir: str, tmp_path: Path) -> None:
    with Lopsided("native", tmp_path, os.environ["VFSD_RUNTIME_DIR"]) as directory_bench:
        difference = directory_bench.run(parse("root: mkdir(b'a', 0o777)\nroot: below()\nroot: mkdir(b'a', 0o777)"))
        assert difference is not None
        assert (difference.index, difference.mount, difference.tmpfs) == (2, ("error", "EEXIST"), ("ok", None))
