"""What a mount shows otherwise than tmpfs, and why: the only differences that the harness lets pass.

`avoided` names the operations that an engine cannot carry: they are not part of its runs (a difference would
go on to all that follows), and a test of its own holds what they answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, get_args

from tests.differential.calls import NOW, Call
from vfsd.operations.declaration import CacheChoice

__all__ = ["Difference", "Known", "avoided", "avoided_call", "reason"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that `tmpfs` and the mount answer differently.  `index` is the call's, -1 for the tree at the end.

    `what` names it: "answer", an attribute of a place ("path 1: mtime"), or a path of the tree.
    """

    index: int
    operation: str
    what: str
    tmpfs: object
    mount: object
    succeeded: bool = False  # the call, on both
    kind: str = ""  # of the first place of the call: the first letter of its mode

    @property
    def signature(self) -> tuple[str, str]:
        """What stays the same when the calls before it are reduced."""
        place, _, attribute = self.what.rpartition(": ")
        return self.operation, f"{place.split()[0] if place else ''}: {attribute}"

    @property
    def may_pass(self) -> bool:
        """Whether something else on the machine can be its reason: a tick of the clock, a file that is being closed."""
        return self.what.endswith((": atime", ": mtime", ": ctime", ": order of times", "statfs"))

    def __str__(self) -> str:
        return f"{self.operation}, {self.what}: tmpfs {self.tmpfs!r}, the mount {self.mount!r}"


@dataclass(frozen=True, slots=True)
class Known:
    """A difference that stays.  `why` says what imposes it; docs/semantics.md tells users of it in `section`."""

    engines: tuple[str, ...]
    matches: Callable[[Call, Difference], bool]
    why: str
    section: str
    ends_episode: bool = False  # what follows from it is different too
    caches: tuple[CacheChoice, ...] = get_args(CacheChoice)


_LONG_SYMLINKS_MAX: Final = 32  # at a time, in one episode
_CHANGING_CONTENT: Final = frozenset({"write", "pwrite", "writev", "sendfile", "copy_file_range", "fallocate"})
_ACL_OPERATIONS: Final = ("set_acl", "set_directory_acl", "fset_acl", "get_acl", "remove_acl")
_LAST_PAGE: Final = 2**63 - 4096
_EMPTY_ACL: Final = b"\x02\x00\x00\x00"  # the version and no entries, linux/posix_acl_xattr.h
_KEEP_SIZE: Final = 1  # FALLOC_FL_KEEP_SIZE
_PYFUSE3: Final = ("pyfuse3",)
_BOTH: Final = ("native", "pyfuse3")
_MOVES: Final = frozenset(
    {"unlink", "rmdir", "rename", "rename_directory", "rename_any", "renameat2", "link", "link_open"}
)


def _coarse_clock(_: Call, difference: Difference) -> bool:
    changed = difference.what.endswith((": mtime", ": ctime")) and (difference.tmpfs, difference.mount) == (
        "same",
        "now",
    )
    return changed and difference.succeeded and difference.operation in _MOVES


def _late_read(_: Call, difference: Difference) -> bool:
    return difference.what.endswith(": atime") and (difference.tmpfs, difference.mount) == ("same", "now")


def _seek_in_directory(call: Call, difference: Difference) -> bool:
    return (
        call.operation in {"seek_sparse", "lseek"}
        and difference.what == "answer"
        and difference.kind == "d"
        and call.args[2] not in (os.SEEK_SET, os.SEEK_CUR)
    )


def _failed_fallocate(call: Call, difference: Difference) -> bool:
    place, _, attribute = difference.what.rpartition(": ")
    return call.operation == "fallocate" and not difference.succeeded and bool(place) and attribute in {"mode", "ctime"}


def _group_id_without_execute(_: Call, difference: Difference) -> bool:
    if not difference.what.endswith(": mode"):
        return False
    tmpfs, mount = str(difference.tmpfs), str(difference.mount)
    return mount[6] == "S" and tmpfs == mount[:6] + "-" + mount[7:]


def _capability_and_set_id(call: Call, difference: Difference) -> bool:
    tmpfs, mount = str(difference.tmpfs), str(difference.mount)
    if call.worker != 0 or call.operation not in _CHANGING_CONTENT or not difference.what.endswith(": mode"):
        return False
    user, group = {"s": "x", "S": "-"}.get(tmpfs[3], tmpfs[3]), "x" if tmpfs[6] == "s" else tmpfs[6]
    return mount == tmpfs[:3] + user + tmpfs[4:6] + group + tmpfs[7:]


def _chown_nothing(call: Call, difference: Difference) -> bool:
    return (
        call.worker != 0
        and call.operation in {"chown", "lchown", "fchown"}
        and call.args[1:] == (-1, -1)
        and (difference.tmpfs, difference.mount) == (("error", "EPERM"), ("ok", None))
    )


def _removed_acl(call: Call, difference: Difference) -> bool:
    if not difference.what.endswith(": mode") or call.worker == 0 or call.operation not in _ACL_OPERATIONS:
        return False
    removes = call.operation == "remove_acl" or call.args[2] in {b"", _EMPTY_ACL}
    tmpfs, mount = str(difference.tmpfs), str(difference.mount)
    kept = mount[6] in "sS" and tmpfs == mount[:6] + {"s": "x", "S": "-"}[mount[6]] + mount[7:]
    return removes and kept


def _fifo_times(call: Call, difference: Difference) -> bool:
    return (
        difference.kind == "p"
        and difference.what.endswith((": mtime", ": ctime", ": atime"))
        and (call.operation in {"write", "writev", "read", "sendfile", "copy_file_range"})
    )


def _touched(call: Call, difference: Difference) -> bool:
    sets_now = call.operation == "utimes_now" or (call.operation in {"utimens", "futimens"} and NOW in call.args[1:3])
    in_one_tick = "time" in difference.what and (difference.tmpfs, difference.mount) == ("now", "same")
    return sets_now and (difference.what.endswith(": order of times") or in_one_tick)


def _hole_of_the_last_page(call: Call, difference: Difference) -> bool:
    if call.operation not in {"seek_sparse", "lseek"} or difference.what != "answer":
        return False
    kind, found = difference.tmpfs  # type: ignore[misc]
    return kind == "ok" and isinstance(found, list | tuple) and found[0] == -(2**63)


def _data_of_the_last_page(call: Call, difference: Difference) -> bool:
    if call.operation not in {"seek_sparse", "lseek"} or call.args[2] != os.SEEK_DATA or difference.what != "answer":
        return False
    (kind, tmpfs), (other, mount) = difference.tmpfs, difference.mount  # type: ignore[misc]
    return kind == other == "ok" and tmpfs[0] == -1 and mount[0] >= _LAST_PAGE  # type: ignore[has-type]


def _seeks_hole(call: Call, difference: Difference) -> bool:
    return call.operation == "lseek" and call.args[2] in {os.SEEK_DATA, os.SEEK_HOLE} and difference.what == "answer"


def _mapped_write(call: Call, difference: Difference) -> bool:
    return call.operation == "map_write" and difference.what.endswith(": mode")


def _both_flags(call: Call, difference: Difference) -> bool:
    return call.operation in {"setxattr", "fsetxattr"} and call.args[3] == os.XATTR_CREATE | os.XATTR_REPLACE


def _times_of_failed_fallocate(call: Call, difference: Difference) -> bool:
    times = difference.what.endswith((": mtime", ": ctime", ": order of times"))
    return call.operation == "fallocate" and not difference.succeeded and times


def _truncated_to_its_size(call: Call, difference: Difference) -> bool:
    times = difference.what.endswith((": mtime", ": ctime", ": order of times"))
    return call.operation == "truncate" and difference.succeeded and times


def _symlink_pages(_: Call, difference: Difference) -> bool:
    if difference.what != "statfs":
        return False
    (*fixed, free, _), (*others, more, _) = difference.tmpfs, difference.mount  # type: ignore[misc]
    return fixed == others and 0 < more - free < _LONG_SYMLINKS_MAX


KNOWN: Final[tuple[Known, ...]] = (
    Known(
        _BOTH,
        _coarse_clock,
        "tmpfs gives directories the time that the moved inode gets, by a clock that ticks every 4 ms: two changes "
        "in one tick look like one (simple_rename_timestamp, fs/libfs.c).  A workspace's clock tells them apart",
        "Times",
    ),
    Known(
        _BOTH,
        _late_read,
        "what the kernel reads ahead may reach the file system, and update atime, after the call that made it read; "
        "and tmpfs sets atime by a clock that ticks every 4 ms, so that a new one can look like the old",
        "Times",
    ),
    Known(
        _BOTH,
        _seek_in_directory,
        "the kernel's FUSE layer seeks in directories by itself, as in files (fuse_dir_operations, fs/fuse/dir.c), "
        "where tmpfs refuses SEEK_END, SEEK_DATA and SEEK_HOLE",
        "Directories",
        ends_episode=True,
    ),
    Known(
        _BOTH,
        _failed_fallocate,
        "fallocate(2) by an unprivileged user clears suid and sgid also where it then fails: the kernel's FUSE layer "
        "has them cleared before it asks (fuse_file_fallocate, fs/fuse/file.c)",
        "Privileges",
        ends_episode=True,
    ),
    Known(
        _BOTH,
        _group_id_without_execute,
        "sgid without group execute stays when somebody outside the file's group changes the file: the kernel tells a "
        "server that keeps set-id bits itself to clear sgid only with group execute (FUSE_HANDLE_KILLPRIV_V2, "
        "linux/fuse.h), and does not say which groups the caller has",
        "Privileges",
        ends_episode=True,
    ),
    Known(
        ("native",),
        _capability_and_set_id,
        "root's write to a file with security.capability clears its suid and sgid too: the kernel asks for the same "
        "as with a chown to (-1, -1), which has to clear them (file_remove_privs, fs/inode.c)",
        "Privileges",
        ends_episode=True,
    ),
    Known(
        _BOTH,
        _chown_nothing,
        "chown(2) of (-1, -1) by a stranger answers 0, not EPERM, where there is suid or sgid: the kernel's FUSE layer "
        "takes the change of mode away before it checks (fuse_setattr, fs/fuse/dir.c).  Nothing is cleared",
        "Privileges",
        ends_episode=True,
    ),
    Known(
        ("native",),
        _removed_acl,
        "sgid stays when an owner outside the file's group removes its ACL: the kernel tells a server to clear sgid "
        "when it sets an ACL, not when it removes one (fuse_set_acl, fs/fuse/acl.c)",
        "Privileges",
        ends_episode=True,
    ),
    Known(
        _BOTH,
        _fifo_times,
        "what goes through a fifo leaves its times alone: the kernel's FUSE layer marks all inodes S_NOCMTIME "
        "(fuse_iget, fs/fuse/inode.c), and a fifo's content never reaches the file system",
        "Times",
        ends_episode=True,
    ),
    Known(
        _PYFUSE3,
        _touched,
        "setting mtime to now makes it up to 4 ms older than ctime, and what it was where it was set to now less than "
        "4 ms before: libfuse hands on the kernel's coarse clock, and not that the time was asked to be now",
        "Times",
        ends_episode=True,
    ),
    Known(
        _BOTH,
        _hole_of_the_last_page,
        "SEEK_HOLE in the last page that a file can have answers the file's end; in tmpfs -2^63, as the sum overflows "
        "(shmem_file_llseek, mm/shmem.c)",
        "Sparse files",
        ends_episode=True,
    ),
    Known(
        ("native",),
        _data_of_the_last_page,
        "SEEK_DATA finds what is in the last page that a file can have; tmpfs answers ENXIO, as the sum overflows "
        "(mapping_seek_hole_data, mm/filemap.c)",
        "Sparse files",
        ends_episode=True,
    ),
    Known(
        _PYFUSE3,
        _seeks_hole,
        "SEEK_DATA and SEEK_HOLE see a file without holes: pyfuse3 has no lseek",
        "Sparse files",
        ends_episode=True,
    ),
    Known(
        _PYFUSE3,
        _mapped_write,
        "what is written through a shared mapping clears suid and sgid where an unprivileged user had opened the "
        "file: it comes as a write like any other (libfuse hides FUSE_WRITE_CACHE)",
        "Privileges",
        ends_episode=True,
    ),
    Known(
        _PYFUSE3,
        _both_flags,
        "XATTR_CREATE with XATTR_REPLACE: pyfuse3 looks at the first of them only (handlers.pxi)",
        "Extended attributes",
        ends_episode=True,
    ),
    Known(
        ("native",),
        _times_of_failed_fallocate,
        "fallocate(2) sets mtime and ctime also where it then fails: with a write-back cache the kernel sets the times "
        "itself, before it asks (fuse_file_fallocate, fs/fuse/file.c)",
        "Write-back cache",
        ends_episode=True,
        caches=("writeback",),
    ),
    Known(
        ("native",),
        _truncated_to_its_size,
        "truncate(2) to the size that a file has leaves its times alone; tmpfs sets them where the file takes space.  "
        "With a write-back cache the kernel sets the times itself (fuse_do_setattr, fs/fuse/dir.c)",
        "Write-back cache",
        ends_episode=True,
        caches=("writeback",),
    ),
    Known(
        _BOTH,
        _symlink_pages,
        "the page that a symlink of 128 bytes or more takes is in its st_blocks, but not in what statfs says is used",
        "Limits, and statfs",
    ),
)


def avoided_call(cache: CacheChoice, call: Call) -> bool:
    """Whether `call` is left out of the runs with `cache`.

    fallocate(2) beyond the end: truncate(2) frees that space if it cuts the file.  With a write-back cache the volume
    may have a smaller size than the kernel has, so that the same call extends its file, and keeps the space.
    """
    return cache == "writeback" and call.operation == "fallocate" and call.args[1] == _KEEP_SIZE


_AVOIDED: Final[dict[str, frozenset[str]]] = {
    "native": frozenset(),
    "pyfuse3": frozenset({"tmpfile", "fallocate", "seek_sparse", *_ACL_OPERATIONS}),
}


def avoided(engine: str) -> frozenset[str]:
    """The operations that are left out of an engine's runs."""
    return _AVOIDED[engine]


def reason(engine: str, cache: CacheChoice, call: Call, difference: Difference) -> Known | None:
    """The entry of the table that lets `difference` pass."""
    table = (known for known in KNOWN if engine in known.engines and cache in known.caches)
    return next((known for known in table if known.matches(call, difference)), None)
