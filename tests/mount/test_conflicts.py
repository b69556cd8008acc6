"""`vfsd conflicts`: what a merge of any two forks would find, before anybody merges."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import click.testing
import pytest

from tests.mount.conftest import mounted
from vfsd.cli import forks
from vfsd.cli.main import cli
from vfsd.client.workspace import Workspace

NAMES = ("work", "f1", "f2", "f3")
MORE = (("memory", 2), ("overlay", 3), ("overlay", 4), ("host", 5))
EXTENDED = [pytest.param(each, marks=pytest.mark.extended) for each in ("overlay", "host")]


def vfsd(*words: str, status: int = 0) -> tuple[str, str]:
    result = click.testing.CliRunner().invoke(cli, [*words])
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout, result.stderr


@pytest.fixture(params=["memory", *EXTENDED])
def work(request: pytest.FixtureRequest, workdir: Path) -> Iterator[Workspace]:
    with mounted(workdir / "work", backend=request.param, engine="native", name="work") as workspace:
        root = Path(workspace.path)
        for number in range(6):
            (root / f"d{number % 3}").mkdir(exist_ok=True)
            (root / f"d{number % 3}" / f"f{number}").write_text("".join(f"{line}\n" for line in range(12)))
        yield workspace


def change(rng: random.Random, root: Path) -> None:
    """Make a random change: edit, append, remove, rename, link, chmod, make a file of a directory."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    path = rng.choice(files) if files else root / "new"
    kind = rng.randrange(8)
    if kind == 0:
        (root / f"new{rng.randrange(3)}").write_text(str(rng.random()))
    elif kind == 1 and files:
        path.unlink()
    elif kind == 2 and files:
        path.rename(root / f"moved{rng.randrange(3)}")
    elif kind == 3 and files:
        path.chmod(rng.choice((0o600, 0o640, 0o755)))
    elif kind == 4:
        (root / f"d{rng.randrange(3)}").mkdir(exist_ok=True)
        (root / f"d{rng.randrange(3)}").chmod(rng.choice((0o700, 0o755)))
    elif kind == 5 and files and not os.path.lexists(root / "link"):
        os.link(path, root / "link")
    elif files:
        lines = path.read_text().splitlines(keepends=True)
        if lines:
            lines[rng.randrange(len(lines))] = f"{rng.random()}\n"
        path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("work", "seed"),
    [("memory", 1), *(pytest.param(*each, marks=pytest.mark.extended) for each in MORE)],
    indirect=["work"],
)
def test_each_pair_has_the_conflicts_of_a_merge(work: Workspace, workdir: Path, seed: int) -> None:
    rng = random.Random(seed)
    with ExitStack() as stack:
        spaces = {"work": work}
        for name in NAMES[1:]:
            spaces[name] = stack.enter_context(work.fork(workdir / name, name=name))
            if rng.random() < 0.5:
                change(rng, Path(work.path))  # the next fork starts later
        for _ in range(2):
            for workspace in spaces.values():
                for _ in range(rng.randrange(4)):
                    try:
                        change(rng, Path(workspace.path))
                    except (FileNotFoundError, NotADirectoryError):
                        continue
            found = work.conflicts(*NAMES[1:])
            assert found == work.conflicts()
            assert found.workspaces == NAMES
            assert len(found.pairs) == 6
            for pair in found.pairs:
                merged = spaces[pair.a].merge(pair.b)
                expected = {path: each.reason for path, each in merged.conflicts.items()}
                assert {path: each.reason for path, each in pair.conflicts.items()} == expected, (pair, merged)
                assert merged.applied == (not pair.conflicts)
                if merged.applied and merged.safety_snapshot is not None:
                    spaces[pair.a].undo()
            spaces["work"].merge("f1", conflicts="markers")  # what has been merged once is the base of the next round


def test_the_table_names_the_conflicts(work: Workspace, workdir: Path) -> None:
    assert "no running forks" in vfsd("conflicts", "-w", "work")[1]
    with work.fork(workdir / "f1", name="f1") as one, work.fork(workdir / "f2", name="f2") as two:
        (Path(one.path) / "d0" / "f0").write_text("one\n")
        (Path(two.path) / "d0" / "f0").write_text("two\n")
        (Path(work.path) / "same").write_text("")
        (Path(two.path) / "same").write_text("")
        said = vfsd("conflicts", "-w", "work")[0]
        assert said == "work\tf1\t0\t0\t\nwork\tf2\t1\t0\t\nf1\tf2\t1\t1\td0/f0\n"
        answer = json.loads(vfsd("conflicts", "-w", "work", "f2", "work", "f2", "--json")[0])
        assert answer["workspaces"] == ["work", "f2"]
        assert answer["pairs"][0]["paths"] == ["same"]
        kind, _, directory = work.status().backend.partition(":")
        assert (answer["below"] is None) == (kind != "overlay")
        if answer["below"] is not None:
            (Path(work.path) / "x").write_text("here")
            (Path(directory) / "x").write_text("below")
            assert [each["path"] for each in json.loads(vfsd("conflicts", "-w", "work", "--json")[0])["below"]] == ["x"]
        base = next(each.name for each in work.snapshots() if each.name.startswith("fork-"))
        work.drop(base, force=True)
        said, noted = vfsd("conflicts", "-w", "work", status=1)
        assert "\t?\t" in said
        assert "cannot be compared: " in noted
        assert "nowhere" in vfsd("conflicts", "-w", "work", "nowhere", status=1)[1]


def test_watch_shows_the_conflicts_again_when_they_have_changed(
    work: Workspace, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conflict(content: str) -> None:
        for place in (Path(work.path), workdir / "f1"):
            (place / "d0" / "f0").write_text(content.format(place.name))

    def interrupt() -> None:
        raise KeyboardInterrupt

    steps = iter((lambda: conflict("{}\n"), lambda: None, lambda: conflict("both\n"), interrupt))
    clock = SimpleNamespace(monotonic=time.monotonic, strftime=time.strftime, sleep=lambda _: next(steps)())
    monkeypatch.setattr(forks, "time", clock)
    with work.fork(workdir / "f1", name="f1"):
        said = vfsd("conflicts", "-w", "work", "--watch", "--json", status=130)[0]
    found = [json.loads(line)["pairs"][0] for line in said.splitlines()]
    assert [(pair["shared"], [each["path"] for each in pair["conflicts"]]) for pair in found] == [
        (0, []),
        (1, ["d0/f0"]),
        (1, []),
    ]
