"""Run git in a private directory: fetch the branches of one repository into another, and merge texts by lines.

Safety: git runs in a repository whose configuration is ours.  It reads no configuration of the user, of the system or
of the repositories that it fetches from and into, and these have no hooks, remotes or filters for it: the private
repository only has links to their `objects`, `refs` and the like.  So nothing is executed that a program has written
into a repository.  Each process has a time limit.

Source: gitrepository-layout(5), git-fetch(1).

`git_text_merge` merges any number of texts by lines with three processes: `git fast-import` makes a repository of three
commits in a private directory, `git merge-tree` merges them, and `git cat-file` returns the results.  A git before 2.38
has no such merge-tree, so it merges file by file with `git merge-file`.  The files are named 0, 1, 2, ... there, with
their extensions, so that no argument comes from a tree.

Of the .gitattributes of a tree only the attribute `merge` counts, and of its values only "union" and those of binary
files (`merge_attributes`).  A driver is run only if the caller names it: one of the user's own configuration
(`user_driver`), never one of a repository.

Source: git-fast-import(1), git-merge-tree(1), git-merge-file(1), gitattributes(5).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, Final, TypeAlias

from protocol.errors import shown
from protocol.values import Value

TIMEOUT_S: Final = 60.0  # of one git process
REFS: Final = "refs/vfsd"  # in the target: refs/vfsd/FORK has the branches of FORK
_MERGED: Final = b"""[core]
\tbare = true
\tcompression = 0
\tfsync = none
[merge]
\trenames = false
\tdirectoryRenames = false
\trenormalize = false
\tconflictStyle = merge
[gc]
\tauto = 0
"""
_FETCHED: Final = """[core]
\tbare = true
\trepositoryFormatVersion = 1
\thooksPath = /dev/null
\tlogAllRefUpdates = false
\talternateRefsCommand = true
[fetch]
\tunpackLimit = 1
\twriteCommitGraph = false
[gc]
\tauto = 0
[maintenance]
\tauto = false
[uploadpack]
\tallowAnySHA1InWant = true
"""
# A private repository shares these with the repository of a workspace, and the settings that say how to read it.
_LINKED: Final = ("objects", "refs", "packed-refs", "reftable", "shallow")
_FORMATS: Final = ("objectFormat", "refStorage")
_HEADS: Final = "refs/heads/"
_NO_SYMLINKS: Final = ("", "refs", REFS, "objects", "objects/pack")
_NAMES_TRIED: Final = 10
_FATAL: Final = 128  # the exit status of git if it cannot work; a fetch that refuses a ref exits with 1
_FILE_BYTES: Final = 65536  # far more than a HEAD and the names of other object directories have
_FAN_OUT: Final = re.compile("[0-9a-f]{2}")
_HASH: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_NOT_TEXT: Final = re.compile("[\udc80-\udcff]")
_NOT_IN_REFS: Final = re.compile(r"\.(?=\.|$|lock$)")  # of what a name of a workspace may have


class GitError(Exception):
    """git could not do its work: one line for people."""


class PrivateGit:
    """git in a private directory, which is its repository and has the files of its input and output.

    `links`: names in the repository that lead elsewhere.
    """

    def __init__(
        self,
        directory: str,
        keep_going: Callable[[], None],
        configuration: bytes = _MERGED,
        links: Mapping[str, str] | None = None,
        head: str = "refs/heads/ours",
    ) -> None:
        self._directory = directory
        self._keep_going = keep_going
        self.driver = ""  # the command that merges texts; it has the user's home directory
        for name, target in (links or {}).items():
            os.symlink(target, self.path(name))
        for name in ("objects", "refs"):
            if name not in (links or {}):
                os.mkdir(self.path(name))
        for name, content in (("HEAD", f"ref: {head}\n".encode()), ("config", configuration)):
            with open(self.path(name), "wb") as out:
                out.write(content)

    def path(self, name: str) -> str:
        """The path of a file in the directory."""
        return os.path.join(self._directory, name)

    def output(self, name: str) -> bytes:
        """The content of a file in the directory."""
        with open(self.path(name), "rb") as file:
            return file.read()

    def run(self, arguments: Sequence[str], stdin: str, stdout: str, fine: Sequence[int] = (0,)) -> int:
        """Run git and return its exit status, which must be one of `fine`.

        Input and output are files, so that neither process can wait for the other.
        """
        with (
            open(self.path(stdin), "rb") as source,
            open(self.path(stdout), "wb") as out,
            open(self.path("errors"), "wb") as errors,
        ):
            try:
                process = subprocess.Popen(
                    ["git", *arguments],
                    stdin=source,
                    stdout=out,
                    stderr=errors,
                    cwd=self._directory,
                    env=self._environment(),
                    process_group=0,  # Ctrl-C is for the caller, who ends git
                )
            except FileNotFoundError:
                raise GitError("git is not installed") from None
            except OSError as error:
                raise GitError(f"git cannot be started: {os.strerror(error.errno or errno.EIO)}") from None
        try:
            status = self._wait(process, arguments[0])
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()
        if status not in fine:
            raise GitError(f"git {arguments[0]} failed: {self.complaint() or f'exit status {status}'}")
        return status

    def complaint(self) -> str:
        """Return the first line that the last process wrote to standard error."""
        return self.output("errors").decode("utf-8", "backslashreplace").strip().partition("\n")[0]

    def _wait(self, process: subprocess.Popen[bytes], command: str) -> int:
        end = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                self._keep_going()
            if time.monotonic() > end:
                raise GitError(f"git {command} did not end within {TIMEOUT_S:.0f} s")

    def _environment(self) -> dict[str, str]:
        home = {"HOME": self._directory, "XDG_CONFIG_HOME": self._directory}
        if self.driver:
            home = {name: os.environ[name] for name in home if name in os.environ}
            home |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": _DRIVER, "GIT_CONFIG_VALUE_0": self.driver}
        return {
            **home,
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C",
            "GIT_DIR": self._directory,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_ALLOW_PROTOCOL": "file",
            "GIT_NO_LAZY_FETCH": "1",
        }


class Fetched(Value):
    """A repository that both sides changed; the target kept its own version.

    `path`: in the workspace.  `refs`: the namespace in the target that has the branches of the other side; empty if
    nothing was fetched.  `left`: refs that git cannot read there, which were left out.  `commands`: for a shell; they
    take over its commits, and refuse as long as a file has conflict markers.  `problem`: why branches could not be
    fetched.  `nothing`: why there are none to fetch.
    """

    path: bytes
    refs: str = ""
    left: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    problem: str = ""
    nothing: str = ""


def fetch_repository(path: bytes, source: str, target: str, name: str, marked: Collection[bytes] = ()) -> Fetched:
    """Fetch the branches of the repository `path` below the directory `source` into the one below `target`.

    They become `refs/vfsd/NAME/BRANCH` there.  A tag or a stash that the target does not have becomes
    `refs/vfsd/NAME/refs/tags/TAG` and `.../refs/stash`, and a detached HEAD `refs/vfsd/NAME/HEAD`.  If earlier commits
    in that namespace would be lost, it is `NAME.2`.  Repositories of submodules are fetched, too.  `marked`: the files
    below `target` that the merge wrote conflict markers into.

    Nothing else in the target changes.  Returns problems; does not raise them.
    """
    where = os.fsdecode(path)
    try:
        with tempfile.TemporaryDirectory(prefix="vfsd-fetch-") as private:
            fetch = _Fetch(private, source, target, where, _NOT_IN_REFS.sub("_", name))
            fetch.marked = [os.path.join(target, os.fsdecode(each)) for each in marked]
            return fetch.run(path)
    except GitError as error:
        return Fetched(path, problem=str(error))
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
        return Fetched(path, problem=f"{shown(os.fsencode(error.filename or where))}: {reason}")


class _Fetch:
    def __init__(self, private: str, source: str, target: str, path: str, name: str) -> None:
        self._private = private
        self._source_root = os.path.realpath(source)
        self._source = os.path.join(self._source_root, path)
        self._root = target
        self._target = os.path.join(target, path)
        self._name = name
        self._left: list[str] = []
        self.marked: Sequence[str] = ()

    def run(self, path: bytes) -> Fetched:
        """See `fetch_repository`."""
        if not _is_repository(self._source):
            is_file = os.path.isfile(self._source)  # of a linked work tree, a submodule, or --separate-git-dir
            there = "only a file that names a repository elsewhere" if is_file else "no repository"
            return Fetched(path, nothing=there)
        if not _is_repository(self._target):
            return Fetched(path, problem="there is no repository here any more")
        commands: list[str] = []
        namespace = ""
        for inner in (*_submodules(self._source), ""):
            if not _is_repository(os.path.join(self._target, inner)):
                continue  # a submodule that only the source has
            fetched, found = self._fetch(inner, is_needed=bool(commands))
            namespace = fetched or namespace
            commands += found
        left = tuple(sorted(self._left))
        if namespace:
            return Fetched(path, f"{REFS}/{namespace}", left, tuple(commands))
        return Fetched(path, left=left, nothing="" if left else "no branches")

    def _fetch(self, inner: str, *, is_needed: bool) -> tuple[str, list[str]]:
        """Fetch one repository; return the namespace, which is empty if nothing was fetched, and the commands.

        `is_needed`: a submodule has commands, whose commit the work tree has to record.
        """
        source, target = (os.path.join(top, inner).rstrip("/") for top in (self._source, self._target))
        for name in _NO_SYMLINKS:
            if os.path.islink(os.path.join(target, name).rstrip("/")):
                raise GitError(f"{name or 'it'} is a symlink, which can lead out of the workspace")
        self._refuse_ways_out(source, target)
        directory = tempfile.mkdtemp(dir=self._private)
        there, here = os.path.join(directory, "there"), os.path.join(directory, "here")
        from_git = _private(there, source, also=target)
        git = _private(here, target)
        heads = {tree: _head(os.path.join(source, tree)) for tree in ("", *_work_trees(source))}
        refs = self._refs(from_git)
        specs = [(ref, ref.removeprefix(_HEADS)) for ref in refs if ref.startswith(_HEADS)]
        self._left += [os.path.join(inner, ref) for ref in _branch_files(source) if ref not in refs]
        known = self._refs(git)
        specs += [(ref, ref) for ref, value in refs.items() if _is_other(ref) and known.get(ref) != value]
        specs += [(head, _detached(tree)) for tree, head in heads.items() if _HASH.fullmatch(head)]
        namespace = self._fetch_specs(git, there, specs, inner)
        self._give_to_owner(target)
        commands = []
        for tree, head in heads.items():
            ref = _detached(tree) if _HASH.fullmatch(head) else head.removeprefix(_HEADS)
            commands += self._commands(git, target, tree, f"{REFS}/{namespace}/{ref}", is_needed=is_needed and not tree)
        return namespace, commands

    def _refuse_ways_out(self, source: str, target: str) -> None:
        """GitError if git would read files outside of the other workspace, which its programs may not be able to read.

        Other object directories outside of it are fine if the target reads there, too.
        """
        known = frozenset(_alternates(os.path.join(target, "objects")))
        waiting = [os.path.join(source, name) for name in _LINKED]
        seen: set[str] = set()
        while waiting:
            place = os.path.normpath(waiting.pop())
            if place in seen:
                continue
            seen.add(place)
            name = shown(os.fsencode(os.path.relpath(place, self._source_root)))
            if os.path.realpath(place) != place or not place.startswith(self._source_root + "/"):
                raise GitError(f"{name} there leads out of the workspace, or through a symlink")
            for directory, _, _ in os.walk(place):
                with os.scandir(directory) as entries:
                    if any(entry.is_symlink() for entry in entries):
                        raise GitError(f"{name} there has a symlink, which can lead out of the workspace")
            waiting += [other for other in _alternates(place) if other not in known]

    def _refs(self, git: PrivateGit) -> dict[str, str]:
        git.run(["for-each-ref", "--format=%(refname) %(objectname)"], os.devnull, "refs-found")
        lines = os.fsdecode(git.output("refs-found")).splitlines()
        return {ref: value for ref, _, value in (line.rpartition(" ") for line in lines)}

    def _fetch_specs(self, git: PrivateGit, source: str, specs: Sequence[tuple[str, str]], inner: str) -> str:
        """Fetch refs, and name them as given in the first namespace in which that loses nothing; return it.

        Refs that git cannot read are left out.  Returns "" if none remains.
        """

        def fetch(words: Sequence[str], stdin: str) -> int:
            options = ["--quiet", "--atomic", "--no-tags", "--no-write-fetch-head"]
            return git.run(["fetch", *options, *words], stdin, "fetched", fine=(0, 1, _FATAL))

        for name in (self._name, *(f"{self._name}.{number}" for number in range(2, _NAMES_TRIED))):
            if not specs:
                return ""
            with open(git.path("specs"), "wb") as out:
                out.writelines(os.fsencode(f"{ref}:{REFS}/{name}/{to}\n") for ref, to in specs)
            status = fetch(["--stdin", source], "specs")
            if status == 0:
                return name
            if status == _FATAL:
                break
        complaint = git.complaint()
        readable = [spec for spec in specs if fetch(["--dry-run", source, spec[0]], os.devnull) == 0]
        if len(readable) == len(specs):
            raise GitError(f"git fetch failed: {complaint}")
        self._left += [os.path.join(inner, spec[0]) for spec in specs if spec not in readable]
        return self._fetch_specs(git, source, readable, inner)

    def _give_to_owner(self, repository: str) -> None:
        """Root fetched: give what is new to the owner of the repository, who could not write there otherwise."""
        owner = os.lstat(repository)
        if os.geteuid() == owner.st_uid:
            return
        for top in (REFS, "objects/pack"):
            for directory, _, names in os.walk(os.path.join(repository, top)):
                for path in (directory, *(os.path.join(directory, name) for name in names)):
                    if os.lstat(path).st_uid == os.geteuid():
                        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)

    # -- the commands ------------------------------------------------------------------------------------
    def _commands(self, git: PrivateGit, repository: str, tree: str, ref: str, *, is_needed: bool) -> list[str]:
        """Return the commands that merge `ref` in a work tree as it is; none if its commits are there already."""
        place = self._place(git, repository, tree)
        head = _head(os.path.join(repository, tree))
        if place is None or not head:
            return []
        is_new = _has(git, ref) and bool(
            git.run(["merge-base", "--is-ancestor", ref, head], os.devnull, "said", fine=(0, 1, 128))
        )
        if not (is_new or is_needed):
            return []
        parents = " ".join(f"-p {shlex.quote(each)}" for each in ("HEAD",) * _has(git, head) + (ref,) * is_new)
        run = f"git -C {shlex.quote(place)}"
        commit = f'{run} commit-tree {parents} -m {shlex.quote(f"Merge {self._name}")} "$({run} write-tree)"'
        commands = [f"{run} add -A", f'{run} reset --soft "$({commit})"']
        marked = [_quoted(each) for each in self.marked if each.startswith(place + "/")]
        if not marked:
            return commands
        return [" && ".join([f"! grep -ls '^<<<<<<< ' {' '.join(marked)}", *commands])]

    def _place(self, git: PrivateGit, repository: str, tree: str) -> str | None:
        """Return the directory of a work tree; None if it is not in the target, or there is none."""
        if tree:
            with contextlib.suppress(OSError, ValueError):
                found = os.path.dirname(first_line(os.path.join(repository, tree, "gitdir")))
                return self._inside(os.path.join(repository, tree, found))
            return None
        if repository == self._target:
            return self._inside(os.path.dirname(repository)) if os.path.basename(repository) == ".git" else None
        found = _setting(git, repository, "core.worktree")
        return self._inside(os.path.join(repository, found)) if found else None

    def _inside(self, path: str) -> str | None:
        path = os.path.normpath(path)
        return path if (path + "/").startswith(self._root.rstrip("/") + "/") and os.path.isdir(path) else None


def has_nothing_staged(repository: str, directory: str, keep_going: Callable[[], None]) -> bool:
    """Whether the index in `directory` has what the commit has that is checked out.  False if git cannot tell.

    `directory`: the repository, or that of a linked work tree or a submodule in it.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="vfsd-index-") as private:
            objects = directory if _is_repository(directory) else repository
            git = _private(os.path.join(private, "git"), objects, keep_going=keep_going)
            os.symlink(os.path.join(directory, "index"), git.path("index"))
            words = ["diff-index", "--cached", "--quiet", _head(directory) or "HEAD"]
            return git.run(words, os.devnull, "said", fine=(0, 1, 128)) == 0
    except (GitError, OSError):
        return False


def _private(
    directory: str, repository: str, *, also: str | None = None, keep_going: Callable[[], None] = lambda: None
) -> PrivateGit:
    """Make a private repository with the objects and refs of `repository`.

    `also`: objects of this repository are read there.  In an overlay, they may have changed below, or be gone.
    """
    os.mkdir(directory)
    links = {name: os.path.join(repository, name) for name in _LINKED}
    links = {name: path for name, path in links.items() if os.path.lexists(path)}
    if also is not None:
        links["objects"] = os.path.join(directory, "others")
        _link_others(os.path.join(repository, "objects"), os.path.join(also, "objects"), links["objects"])
    git = PrivateGit(directory, keep_going, _FETCHED.encode(), links, "refs/heads/none")
    formats = {name: _setting(git, repository, f"extensions.{name}") for name in _FORMATS}
    lines = [f"\t{name} = {value}\n" for name, value in formats.items() if value.isalnum()]
    with open(git.path("config"), "a") as out:
        out.writelines(["[extensions]\n", *lines])
    return git


def _link_others(source: str, target: str, made: str) -> None:
    """Make the object directory `made` with the objects of `source`; those that `target` has are read there."""
    for name in sorted(os.listdir(source)):
        if name != "pack" and not _FAN_OUT.fullmatch(name):
            continue
        os.makedirs(os.path.join(made, name))
        there = os.path.join(target, name)
        known = frozenset(os.listdir(there) if os.path.isdir(there) else ())
        found: list[str] = []
        with contextlib.suppress(FileNotFoundError):  # removed below an overlay, which has listed it before
            found = os.listdir(os.path.join(source, name))
        for each in found:
            if each not in known and (name != "pack" or each.startswith("pack-")):
                os.symlink(os.path.join(source, name, each), os.path.join(made, name, each))
    os.makedirs(os.path.join(made, "info"))
    with open(os.path.join(made, "info/alternates"), "wb") as out:
        out.writelines(os.fsencode(line) + b"\n" for line in (target, *_alternates(source)))


def _alternates(objects: str) -> list[str]:
    """Return the other object directories that the object directory `objects` names."""
    with contextlib.suppress(OSError, ValueError):
        lines = os.fsdecode(_read(os.path.join(objects, "info/alternates"))).splitlines()
        return [os.path.join(objects, line) for line in lines]
    return []


def _setting(git: PrivateGit, repository: str, name: str) -> str:
    config = os.path.join(repository, "config")
    git.run(["config", "--file", config, "--get", name], os.devnull, "value", fine=(0, 1))
    return os.fsdecode(git.output("value")).rstrip("\n")


def _has(git: PrivateGit, ref: str) -> bool:
    return git.run(["rev-parse", "--quiet", "--verify", ref], os.devnull, "said", fine=(0, 1, 128)) == 0


def _is_repository(path: str) -> bool:
    return os.path.lexists(os.path.join(path, "HEAD")) and os.path.isdir(os.path.join(path, "objects"))


def _branch_files(repository: str) -> list[str]:
    """Return the names that branches have as files; git lists only those that it can read."""
    heads = os.path.join(repository, _HEADS)
    paths = (os.path.join(directory, name) for directory, _, names in os.walk(heads) for name in names)
    return sorted(_HEADS + os.path.relpath(path, heads) for path in paths if not path.endswith(".lock"))


def _quoted(path: str) -> str:
    """Quote a path for a shell, as text: each byte that is not UTF-8 as a pattern that matches any byte."""
    return "?".join(map(shlex.quote, _NOT_TEXT.split(path)))


def _is_other(ref: str) -> bool:
    return ref == "refs/stash" or ref.startswith("refs/tags/")


def _detached(tree: str) -> str:
    return f"{tree}/HEAD" if tree else "HEAD"


def _head(repository: str) -> str:
    """Return the branch, or the hash of the commit, that is checked out; empty if it cannot be told."""
    with contextlib.suppress(OSError, ValueError):
        head = first_line(os.path.join(repository, "HEAD"))
        if head.startswith("ref: refs/heads/") or _HASH.fullmatch(head):
            return head.removeprefix("ref: ")
    return ""


def first_line(path: str) -> str:
    """Return the first line of a small regular file.  OSError; ValueError for another one."""
    return os.fsdecode(_read(path)).partition("\n")[0]


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a file")
        return os.read(descriptor, _FILE_BYTES)
    finally:
        os.close(descriptor)


def _work_trees(repository: str) -> Iterator[str]:
    """Yield the linked work trees of a repository: `worktrees/NAME`."""
    with contextlib.suppress(OSError):
        yield from (f"worktrees/{name}" for name in sorted(os.listdir(os.path.join(repository, "worktrees"))))


def _submodules(repository: str, above: str = "") -> Iterator[str]:
    """Yield the repositories of submodules, with those of their submodules first."""
    modules = os.path.join(repository, above, "modules")
    for directory, names, _ in os.walk(modules):
        if _is_repository(directory):
            names.clear()
            inner = os.path.relpath(directory, repository)
            yield from _submodules(repository, inner)
            yield inner


# -- texts -----------------------------------------------------------------------------------------
_BATCH_FILES: Final = 1_000
_BATCH_BYTES: Final = 32 * 1024 * 1024
_DRIVER: Final = "merge.tool.driver"
_USAGE: Final = 129  # git's exit status for an option that it does not know
_MERGE_FILE_ERROR: Final = 128  # `git merge-file` exits with the number of conflicts, at most 127, or with 255


class TextCase(Value):
    """Three versions of a text.  Each is read when it is needed; `base` is None if there is none.

    `size_bytes` is their sum, for batches of a bounded size.  `is_union`: in a conflict, take the lines of both sides.
    `extension`: that of the file's name, for a driver.
    """

    base: Callable[[], bytes] | None
    ours: Callable[[], bytes]
    theirs: Callable[[], bytes]
    size_bytes: int
    is_union: bool = False
    extension: bytes = b""

    def name(self, number: int) -> bytes:
        """Return the file's name among those that are merged together."""
        return b"%d%s" % (number, self.extension)


class TextResult(Value):
    """A merged text.

    If `is_clean` is false, `content` has conflict markers, or is None if there is no result; `problem` says why.
    """

    content: bytes | None
    is_clean: bool
    problem: str = ""


# Called with the cases and a function to call often, which may raise; returns one result for each case.
TextMerge: TypeAlias = Callable[[Sequence[TextCase], Callable[[], None]], Sequence[TextResult]]


def user_driver(name: str) -> str:
    """Return the command of the merge driver `name` in the global git configuration of the user.

    The configuration of the system, of repositories and of the current directory does not count.  FileNotFoundError.
    """
    key = f"merge.{name}.driver"
    command = ["git", "config", "--global", "--get", key]
    kept = {"PATH", "HOME", "XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL"} & os.environ.keys()
    environment = {each: os.environ[each] for each in kept}
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):  # no git, or an impossible name
        found = subprocess.run(command, cwd="/", env=environment, capture_output=True, timeout=TIMEOUT_S, check=False)
        if driver := os.fsdecode(found.stdout.rstrip(b"\n")):
            return driver
    reason = f"there is no merge driver {name!r} in your global git configuration ({key})"
    raise FileNotFoundError(errno.ENOENT, reason)


def git_text_merge(cases: Sequence[TextCase], keep_going: Callable[[], None], driver: str = "") -> list[TextResult]:
    """Merge the texts by lines as `git merge` does; with `driver`, a command as in gitattributes(5), as that does.

    Without git, or if git fails or takes longer than `git.TIMEOUT_S`, the result of each case says so.  OSError if a
    version cannot be read.
    """
    results: list[TextResult] = []
    for batch in _batches(cases):
        try:
            results += _merged_batch(batch, keep_going, driver)
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


def _merged_batch(cases: Sequence[TextCase], keep_going: Callable[[], None], driver: str) -> list[TextResult]:
    try:
        directory = tempfile.mkdtemp(prefix="vfsd-merge-")
    except OSError as error:
        raise _no_temporary_file(error) from None
    try:
        git = PrivateGit(directory, keep_going)
        _write_commits(cases, git.path("import"), keep_going)
        os.mkdir(git.path("info"))
        with open(git.path("info/attributes"), "wb") as rules:
            rules.write(b"* merge=tool\n" if driver else b"")
            unions = (case.name(number) for number, case in enumerate(cases) if case.is_union)
            rules.writelines(b"/%s merge=union\n" % name for name in unions)
        # Its standard output would be git's, which is parsed below.  The line end ends a comment in the command.
        git.driver = driver and f"({driver}\n) >/dev/null"
        git.run(["fast-import", "--quiet"], "import", "imported")
        os.unlink(git.path("import"))
        options = ["--write-tree", "-z", "--name-only", "--no-messages"]
        status = git.run(["merge-tree", *options, "ours", "theirs"], os.devnull, "merged", fine=(0, 1, _USAGE))
        if status == _USAGE and driver:
            raise GitError("a merge tool needs git 2.38 or later")
        if status == _USAGE:
            return [_merged_file(git, case) for case in cases]
        tree, *in_conflict = git.output("merged").rstrip(b"\0").split(b"\0")
        with open(git.path("wanted"), "wb") as wanted:
            wanted.writelines(b"%s:%s\n" % (tree, case.name(number)) for number, case in enumerate(cases))
        git.run(["cat-file", "--batch"], "wanted", "contents")
        conflicts = {int(name.partition(b".")[0]) for name in in_conflict}
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
                    yield b"M 100644 inline %s\ndata %d\n%s\n" % (case.name(number), len(content), content)

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
    union = ["--union"] if case.is_union else []
    status = git.run(["merge-file", "-p", *union, *labels, "o", "b", "t"], os.devnull, "merged", fine=fine)
    return TextResult(git.output("merged"), is_clean=status == 0)


def certain_result(case: TextCase) -> TextResult | None:
    """Return the result of `git_text_merge` if it is certain without git, else None.  A conflict has no content.

    Each side has replaced one run of lines of the base.  If no removed line is left in the side, and no added line is
    in the base, only the lines above and below the run can be equal.  git's histogram diff aligns a line that occurs
    once in the base with its only equal in the side.  It extends that block as far as the lines are equal: to the run,
    and to the end of the text.  So if such a line is above the run and another one below it (or no line at all is
    there), git finds exactly that run, and cannot slide it.  Two runs with lines between them merge; others conflict,
    unless the sides are equal.

    Source: xdiff/xhistogram.c, xdl_change_compact in xdiff/xdiffi.c and xdl_do_merge in xdiff/xmerge.c of git.
    """
    if case.base is None or case.is_union:
        return None
    texts = (case.base(), case.ours(), case.theirs())
    if any(b"\0" in text for text in texts):
        return None
    base, *sides = (io.BytesIO(text).readlines() for text in texts)  # unlike splitlines, it leaves \r in the line
    numbers = Counter(base)
    runs = []
    for side in sides:
        most = min(len(base), len(side))
        start = next((at for at in range(most) if base[at] != side[at]), most)
        below = next((at for at in range(most - start) if base[-1 - at] != side[-1 - at]), most - start)
        end = len(base) - below
        removed, added = base[start:end], side[start : len(side) - below]
        is_certain = numbers.keys().isdisjoint(added) and {*base[:start], *base[end:]}.isdisjoint(removed)
        anchors = (not lines or any(numbers[line] == 1 for line in lines) for lines in (base[:start], base[end:]))
        if not (is_certain and (removed or added) and all(anchors)):
            return None
        runs.append((start, end, added))
    if sides[0] == sides[1]:
        return TextResult(texts[1], is_clean=True)
    (start, end, first), (next_start, next_end, second) = sorted(runs)
    if end >= next_start:
        return TextResult(None, is_clean=False)
    content = [*base[:start], *first, *base[end:next_start], *second, *base[next_end:]]
    return TextResult(b"".join(content), is_clean=True)


def merge_attributes(
    paths: Sequence[bytes], files: Mapping[bytes, bytes], keep_going: Callable[[], None]
) -> list[bytes]:
    """Return the value of the attribute `merge` of each path: b"union", b"unset" (of `binary`), b"unspecified", ...

    `files`: the content of the .gitattributes files, by their paths.  Without git, b"unspecified" for all.
    """
    unspecified = [b"unspecified"] * len(paths)
    if not files:
        return unspecified
    try:
        with tempfile.TemporaryDirectory(prefix="vfsd-merge-", ignore_cleanup_errors=True) as directory:
            git = PrivateGit(directory, keep_going)
            top = os.fsencode(git.path("tree"))
            os.mkdir(top)
            for path, content in files.items():
                place = os.path.join(top, path)
                os.makedirs(os.path.dirname(place), exist_ok=True)
                with open(place, "wb") as out:
                    out.write(content)
            with open(git.path("paths"), "wb") as out:
                out.write(b"".join(path + b"\0" for path in paths))
            git.run(["--work-tree=tree", "check-attr", "--stdin", "-z", "merge"], "paths", "values")
            values = git.output("values").split(b"\0")[2::3]
    except (GitError, OSError):  # the merge of the texts says why git does not work, or why there is no temporary file
        return unspecified
    return values if len(values) == len(paths) else unspecified
