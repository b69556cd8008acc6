"""Merge texts by lines, with git.

`git_text_merge` merges any number of files with three processes: `git fast-import` makes a repository of three commits
in a private directory, `git merge-tree` merges them, and `git cat-file` returns the results.  A git before 2.38 has no
such merge-tree, so it merges file by file with `git merge-file`.

Safety: git sees the contents only.  In the repository the files are named 0, 1, 2, ..., so that no argument, name or
.gitattributes comes from a tree; git reads no configuration of the user or the system; and the repository has no hooks,
remotes or filters.

Source: git-fast-import(1), git-merge-tree(1), git-merge-file(1).
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Final, TypeAlias

from protocol.merge.git import GitError, PrivateGit
from protocol.values import Value

_BATCH_FILES: Final = 1_000
_BATCH_BYTES: Final = 32 * 1024 * 1024
_USAGE: Final = 129  # git's exit status for an option that it does not know
_MERGE_FILE_ERROR: Final = 128  # `git merge-file` exits with the number of conflicts, at most 127, or with 255


class TextCase(Value):
    """Three versions of a text.  Each is read when it is needed; `base` is None if there is none.

    `size_bytes` is their sum, for batches of a bounded size.
    """

    base: Callable[[], bytes] | None
    ours: Callable[[], bytes]
    theirs: Callable[[], bytes]
    size_bytes: int


class TextResult(Value):
    """A merged text.

    If `is_clean` is false, `content` has conflict markers, or is None if there is no result; `problem` says why.
    """

    content: bytes | None
    is_clean: bool
    problem: str = ""


# Called with the cases and a function to call often, which may raise; returns one result for each case.
TextMerge: TypeAlias = Callable[[Sequence[TextCase], Callable[[], None]], Sequence[TextResult]]


def git_text_merge(cases: Sequence[TextCase], keep_going: Callable[[], None]) -> list[TextResult]:
    """Merge the texts by lines as `git merge` does.

    Without git, or if git fails or takes longer than `git.TIMEOUT_S`, the result of each case says so.  OSError if a
    version cannot be read.
    """
    results: list[TextResult] = []
    for batch in _batches(cases):
        try:
            results += _merged_batch(batch, keep_going)
        except GitError as error:
            results += [TextResult(None, is_clean=False, problem=str(error))] * len(batch)
    return results


def _batches(cases: Sequence[TextCase]) -> Iterator[list[TextCase]]:
    batch: list[TextCase] = []
    size_bytes = 0
    for case in cases:
        if batch and (len(batch) == _BATCH_FILES or size_bytes + case.size_bytes > _BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(case)
        size_bytes += case.size_bytes
    if batch:
        yield batch


def _merged_batch(cases: Sequence[TextCase], keep_going: Callable[[], None]) -> list[TextResult]:
    try:
        directory = tempfile.mkdtemp(prefix="vfsd-merge-")
    except OSError as error:
        raise _no_temporary_file(error) from None
    try:
        git = PrivateGit(directory, keep_going)
        _write_commits(cases, git.path("import"), keep_going)
        git.run(["fast-import", "--quiet"], "import", "imported")
        os.unlink(git.path("import"))
        options = ["--write-tree", "-z", "--name-only", "--no-messages"]
        status = git.run(["merge-tree", *options, "ours", "theirs"], os.devnull, "merged", fine=(0, 1, _USAGE))
        if status == _USAGE:
            return [_merged_file(git, case) for case in cases]
        tree, *in_conflict = git.output("merged").rstrip(b"\0").split(b"\0")
        with open(git.path("wanted"), "wb") as wanted:
            wanted.writelines(b"%s:%d\n" % (tree, number) for number in range(len(cases)))
        git.run(["cat-file", "--batch"], "wanted", "contents")
        conflicts = set(map(int, in_conflict))
        with open(git.path("contents"), "rb") as contents:
            return [TextResult(_blob(contents), number not in conflicts) for number in range(len(cases))]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write_commits(cases: Sequence[TextCase], path: str, keep_going: Callable[[], None]) -> None:
    """Write the input of `git fast-import`: a commit of all bases, and one of each side on top of it."""

    def lines() -> Iterator[bytes]:
        for branch in (b"base", b"ours", b"theirs"):
            yield b"commit refs/heads/%s\ncommitter vfsd <vfsd> 0 +0000\ndata 0\n" % branch
            if branch != b"base":
                yield b"from refs/heads/base\n"
            for number, case in enumerate(cases):
                read = case.base if branch == b"base" else case.ours if branch == b"ours" else case.theirs
                if read is not None:
                    keep_going()
                    content = read()
                    yield b"M 100644 inline %d\ndata %d\n%s\n" % (number, len(content), content)

    with open(path, "wb", buffering=0) as out:
        for each in lines():
            _write(out, each)


def _write(out: IO[bytes], content: bytes) -> None:
    try:
        with memoryview(content) as rest:
            done = 0
            while done < len(content):
                done += out.write(rest[done:])
    except OSError as error:
        raise _no_temporary_file(error) from None


def _no_temporary_file(error: OSError) -> GitError:
    reason = os.strerror(error.errno or errno.EIO)
    return GitError(f"no temporary file in {tempfile.gettempdir()}, so the file cannot be merged by lines: {reason}")


def _blob(contents: IO[bytes]) -> bytes:
    """The next object in the output of `git cat-file --batch`."""
    header = contents.readline().split()
    if len(header) != 3 or header[1] != b"blob":
        raise GitError("git cat-file did not return the merged file")
    content = contents.read(int(header[2]))
    contents.read(1)
    return content


def _merged_file(git: PrivateGit, case: TextCase) -> TextResult:
    """Merge one text with `git merge-file`."""
    for name, read in (("b", case.base), ("o", case.ours), ("t", case.theirs)):
        with open(git.path(name), "wb", buffering=0) as out:
            _write(out, read() if read is not None else b"")
    labels = ["-L", "ours", "-L", "base", "-L", "theirs"]
    fine = tuple(range(_MERGE_FILE_ERROR))
    status = git.run(["merge-file", "-p", *labels, "o", "b", "t"], os.devnull, "merged", fine=fine)
    return TextResult(git.output("merged"), is_clean=status == 0)
