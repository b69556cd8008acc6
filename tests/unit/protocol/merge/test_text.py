"""Merging texts by lines, with the real git."""

from __future__ import annotations

import functools
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from protocol.merge.git import TextCase, TextResult, certain_result, git_text_merge, user_driver
from protocol.merge.three_way import merge
from tests.support.seeds import campaign_seed
from tests.support.trees import DictTree

LINES = [b"%d\n" % number for number in range(10)]
BASE = b"".join(LINES)
FIRST = BASE.replace(b"0\n", b"first\n")
LAST = BASE.replace(b"9\n", b"last\n")
BOTH = FIRST.replace(b"9\n", b"last\n")


def case(base: bytes | None, ours: bytes, theirs: bytes) -> TextCase:
    read_base = None if base is None else lambda: base
    return TextCase(read_base, lambda: ours, lambda: theirs, 1)


def merged(*cases: tuple[bytes | None, bytes, bytes]) -> list[TextResult]:
    return list(git_text_merge([case(*each) for each in cases], lambda: None))


@pytest.fixture(params=["merge-tree", "merge-file"])
def git(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Both ways to merge; an old git does not know the options of the first one."""
    if request.param == "merge-file":
        real = shutil.which("git")
        script = tmp_path / "git"
        script.write_text(f'#!/bin/sh\n[ "$1" = merge-tree ] && exit 129\nexec {real} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return str(request.param)


def test_each_case_has_its_own_result(git: str) -> None:
    same_line = TextResult(b"<<<<<<< ours\nb\n=======\nc\n>>>>>>> theirs\n", is_clean=False)
    results = merged(
        (BASE, FIRST, LAST), (b"a\n", b"b\n", b"c\n"), (None, b"b\n", b"c\n"), (BASE, LAST, FIRST), (b"", b"x\n", b"")
    )

    assert results == [
        TextResult(BOTH, is_clean=True),
        same_line,
        same_line,
        TextResult(BOTH, is_clean=True),
        TextResult(b"x\n", is_clean=True),
    ]


@pytest.mark.parametrize(
    ("base", "ours", "theirs", "expected"),
    [
        (BASE[:-1], FIRST[:-1], LAST[:-1], BOTH[:-1]),  # no newline at the end
        (BASE.replace(b"\n", b"\r\n"), FIRST.replace(b"\n", b"\r\n"), LAST.replace(b"\n", b"\r\n"), None),
        (b"", b"", b"x", b"x"),
        (BASE, FIRST, b"", None),
        (b"\xff\n" + BASE, b"\xff\n" + FIRST, b"\xff\n" + LAST, b"\xff\n" + BOTH),
        (b"\n".join(LINES), b"\n".join(LINES[:9]), b"\n".join(LINES), b"\n".join(LINES[:9])),
    ],
)
def test_line_ends_and_bytes_are_kept(
    git: str, base: bytes, ours: bytes, theirs: bytes, expected: bytes | None
) -> None:
    (result,) = merged((base, ours, theirs))

    if expected is None and b"\r" in base:
        assert result == TextResult(BOTH.replace(b"\n", b"\r\n"), is_clean=True)
    elif expected is None:
        assert not result.is_clean
    else:
        assert result == TextResult(expected, is_clean=True)


def test_content_that_looks_like_input_of_git_is_content(git: str) -> None:
    hostile = b"data 3\nabc\ndone\ncommit refs/heads/ours\n\n* filter=x merge=union\n"

    assert merged((BASE, hostile + BASE, LAST)) == [TextResult(hostile + LAST, is_clean=True)]


def test_configuration_and_attributes_of_the_user_are_not_read(
    git: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    (home / "git").mkdir(parents=True)
    (home / ".gitconfig").write_text('[merge "x"]\n\tdriver = touch %A.ran; exit 1\n[merge]\n\tconflictStyle = diff3\n')
    (home / "git" / "attributes").write_text("* merge=x\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home / ".gitconfig"))
    monkeypatch.setenv("GIT_DIR", str(home))
    monkeypatch.setenv("GIT_INDEX_FILE", str(home / "index"))

    assert merged((BASE, FIRST, LAST), (b"a\n", b"b\n", b"c\n")) == [
        TextResult(BOTH, is_clean=True),
        TextResult(b"<<<<<<< ours\nb\n=======\nc\n>>>>>>> theirs\n", is_clean=False),
    ]


def test_without_git_each_case_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    (result,) = merged((BASE, FIRST, LAST))

    assert result == TextResult(None, is_clean=False, problem=result.problem)
    assert "git is not installed" in result.problem


def test_a_git_that_fails_is_a_conflict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "git"
    script.write_text("#!/bin/sh\necho out of luck >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    (result,) = merged((BASE, FIRST, LAST))

    assert result.problem == "git fast-import failed: out of luck"


def test_a_git_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "git"
    script.write_text("#!/bin/sh\nexec sleep 1000\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("protocol.merge.git.TIMEOUT_S", 0.0)

    (result,) = merged((BASE, FIRST, LAST))

    assert result.problem == "git fast-import did not end within 0 s"


def test_a_merge_that_nobody_waits_for_ends_git_and_leaves_no_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class StopError(Exception):
        pass

    def stop() -> None:
        raise StopError

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with pytest.raises(StopError):
        git_text_merge([case(BASE, FIRST, LAST)], stop)

    assert not list(tmp_path.iterdir())


def test_the_files_of_a_merge_are_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    modes = []

    def read() -> bytes:
        modes.extend(stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir())
        return BASE

    git_text_merge([TextCase(read, read, read, 1)], lambda: None)

    assert set(modes) == {0o700}
    assert not list(tmp_path.iterdir())


def test_git_is_called_once_for_all_files_and_not_without_need() -> None:
    calls: list[int] = []

    def text_merge(cases: Sequence[TextCase], keep_going: object) -> list[TextResult]:
        calls.append(len(cases))
        return git_text_merge(cases, lambda: None)

    base = DictTree({b"%d" % number: BASE for number in range(10)})
    ours = DictTree({b"%d" % number: FIRST if number < 7 else BASE for number in range(10)})
    theirs = DictTree({b"%d" % number: LAST if number > 3 else FIRST for number in range(10)})

    result = merge(base, ours, theirs, text_merge=text_merge)
    merge(base, ours, base, text_merge=text_merge)
    merge(base, base, theirs, text_merge=text_merge)

    assert calls == [3]
    assert result.tree.read(b"5", 0, 1000) == BOTH
    assert not result.conflicts


def random_texts(rng: random.Random) -> tuple[bytes, bytes, bytes]:
    """A text, often with equal lines, and two versions of it with some lines replaced by new or existing ones."""
    repeats = rng.choice((0.2, 0.5, 0.8))
    ends = b"\r\n" if rng.random() < 0.05 else b"\n"

    def line() -> bytes:
        return rng.choice((b"a", b"b", b"", b"}")) if rng.random() < repeats else b"%d" % rng.randrange(40)

    base = [line() for _ in range(rng.randrange(14))]
    versions = []
    for _ in range(2):
        lines = list(base)
        for _ in range(rng.choice((1, 1, 1, 2))):
            at = rng.randrange(len(lines) + 1)
            new = [b"new %d" % rng.randrange(6) if rng.random() < 0.7 else line() for _ in range(rng.randrange(4))]
            lines[at : at + rng.randrange(4)] = new
        versions.append(ends.join(lines) + rng.choice((ends, ends, b"")))
    return ends.join(base) + rng.choice((ends, b"")), versions[0], versions[1]


def test_a_result_that_is_certain_is_that_of_git() -> None:
    rng = random.Random(campaign_seed())
    cases = [case(*random_texts(rng)) for _ in range(1_000)]
    certain = [(each, found) for each in cases if (found := certain_result(each)) is not None]
    of_git = git_text_merge([each for each, _ in certain], lambda: None)
    assert len({found.is_clean for _, found in certain}) == 2
    for (each, found), expected in zip(certain, of_git, strict=True):
        assert found.is_clean == expected.is_clean, (each.base and each.base(), each.ours(), each.theirs())
        assert not found.is_clean or found.content == expected.content
    with_nul = case(BASE, FIRST + b"\0", LAST)
    assert certain_result(with_nul) is None


def test_a_full_disk_is_a_conflict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A file may not grow over the limit, which raises EFBIG as a full disk raises ENOSPC.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        (result,) = merged((BASE * 100, FIRST * 100, LAST * 100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

    assert result.content is None
    assert "no temporary file in" in result.problem
    assert not list(tmp_path.iterdir())


def test_without_a_temporary_directory_each_case_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))

    (result,) = merged((BASE, FIRST, LAST))

    assert result.problem.endswith("No such file or directory")


def test_attributes_hold_as_they_do_for_git(git: str, tmp_path: Path) -> None:
    """The oracle is `git merge` in a repository; each path is changed on both sides, at the same line."""
    base: dict[bytes, bytes] = {
        b".gitattributes": b"[attr]mine merge=union\n*.u merge=union\n*.b binary\n"
        b"k -merge\nw merge=binary\nd/** mine\n",
        b"d/sub/.gitattributes": b"*.t !merge\n*.u -merge\n",
    }
    names = (b"a.u", b"a.b", b"a.t", b"k", b"w", b"o", b"d/f", b"d/sub/f", b"d/sub/x.t", b"d/sub/x.u", b"e/k", b"e/a.u")
    versions = {
        side: base | {name: b"1\n" + side.encode() + b"\n3\n" for name in names} for side in ("base", "ours", "theirs")
    }
    place = tmp_path / "twin"
    place.mkdir()

    def run(*words: str) -> subprocess.CompletedProcess[bytes]:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=ours")
        return subprocess.run(["git", *who, "-C", str(place), *words], capture_output=True, check=False)

    run("init", "-q")
    for side, start in (("base", []), ("theirs", ["-b", "theirs"]), ("ours", ["ours"])):
        if start:
            run("checkout", "-q", *start)
        for name, content in versions[side].items():
            path = place / os.fsdecode(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        run("add", "-A")
        run("commit", "-qm", side)
    run("merge", "-q", "theirs")
    expected = set(run("diff", "--name-only", "--diff-filter=U").stdout.split())
    result = merge(*(DictTree(versions[side]) for side in ("base", "ours", "theirs")))
    assert {conflict.path for conflict in result.conflicts} == expected
    for name in names:
        if name not in expected:
            assert result.tree.read(name, 0, 100) == (place / os.fsdecode(name)).read_bytes()
    binary = {conflict.path for conflict in result.conflicts if conflict.reason == "binary"}
    assert binary == {b"a.b", b"k", b"w", b"d/sub/x.u", b"e/k"}


def test_a_driver_of_the_user_merges_what_both_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the user's global configuration only, has the file's extension, and runs in the user's home.

    Its output is no part of git's own.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("GIT_CONFIG_GLOBAL", raising=False)
    driver = tmp_path / "driver"
    says = 'printf "0.py\\0merging\\n"'
    driver.write_text(f'#!/bin/sh\n{says}\necho "$4" >> ~/seen\ngrep -q clean "$2" || exit 1\ncat "$3" >> "$2"\n')
    driver.chmod(0o755)
    (tmp_path / ".gitconfig").write_text(f'[merge "mine"]\n\tdriver = "{driver} %O %A %B %P # mine"\n')
    (tmp_path / "repository").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path / "repository")], check=True)
    subprocess.run(["git", "-C", str(tmp_path / "repository"), "config", "merge.its.driver", "false"], check=True)
    monkeypatch.chdir(tmp_path / "repository")
    with pytest.raises(FileNotFoundError, match="no merge driver 'its'"):
        user_driver("its")
    text_merge = functools.partial(git_text_merge, driver=user_driver("mine"))
    trees = [DictTree(dict.fromkeys((b"d/a.py", b"b"), each)) for each in (b"1\n", b"clean\n", b"3\n")]
    result = merge(*trees, text_merge=text_merge)
    assert not result.conflicts
    assert result.tree.read(b"d/a.py", 0, 100) == b"clean\n3\n"
    assert sorted((tmp_path / "seen").read_text().split()) == ["0", "1.py"]
    trees[1] = DictTree(dict.fromkeys((b"d/a.py", b"b"), b"2\n"))
    assert len(merge(*trees, text_merge=text_merge).conflicts) == 2
