"""OverlayState: the live inodes over a lower layer, loaded as late as possible.

Loading is not a change: every snapshot already contained what is loaded, so loading leaves no pre-image, and the stamp
of a loaded inode (epoch 0) is older than all others.  Three steps, each at the first access:

- one scan of a directory gives it its entries (`_fill`): only a number for each name;
- one `Lower.stat` of the name gives a number its inode (`_make`), with the `LowerFile` that content comes from;
- a block of content is read when it is read through the mount, and copied up when it is changed in part.

The names of one file in the lower layer get one number, recognised by `LowerEntry.key`.  A file gets the number that
the layer suggests, so that it has the same one at every mount, unless another inode has that number already.

A directory is loaded before a second version of it exists (`own`), so the link count that loading finds is written to
one version only.  Its size is that of the lower directory until its entries change, and from then on computed as in the
memory volume.  A name that is loaded late belongs to all versions of its inode, which `versions` finds.

A journal records an inode of the lower layer, and the entries of a directory, before they change for the first time;
`recorded` and `listed` have these.  `put_recorded`, `put_listing` and `correct` load them from a journal, without
reading the lower layer.  Names of recorded inodes in directories whose entries are not recorded wait in
`_recorded_names` until the directory is loaded.

Threading: any thread may load, under `lock`; the volume also holds `lock` for every change of the state.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from protocol.backends.memory.inode import DIRECTORY_BASE_BYTES, DIRECTORY_ENTRY_BYTES, Inode, Link
from protocol.backends.memory.ledger import ENTRY_BYTES, VERSION_LINK_BYTES
from protocol.backends.memory.state import MemoryState
from protocol.backends.overlay.inode import InodeTable, LowerContent, OverlayInode, UnfilledChildren, lower_files
from protocol.backends.overlay.lower import (
    FIRST_NEW_NUMBER,
    LOST_NS,
    EarlierState,
    HiddenNames,
    Identity,
    Lower,
    LowerEntry,
    LowerFile,
    LowerStat,
    RecordedStat,
    identity,
    is_gone,
)
from protocol.errors import NotReadyError, os_error
from protocol.linux import statx
from protocol.tree import TYPE_MASK
from protocol.volume import ROOT_INODE

if TYPE_CHECKING:
    from protocol.adapters.git_patterns import PathFilter
    from protocol.backends.memory.xattrs import Xattrs
    from protocol.backends.overlay.known_inodes import KnownInodes
    from protocol.tree import TreeEntry

_LOWER_NAME_BYTES: Final = 640  # memory of a listed name: its entry, number and kind
_LOWER_INODE_BYTES: Final = 640  # memory of a loaded inode, in addition to that of every inode


class OverlayState(MemoryState):
    """The state of one overlay.  `path_filter` hides paths of the lower layer."""

    def __init__(self, clock: Callable[[], int], lower: Lower, path_filter: PathFilter) -> None:
        seen = lower.stat(b"")
        super().__init__(clock, seen.st_uid, seen.st_gid)
        self.lower = lower
        self.path_filter = path_filter
        self._started_ns = time.time_ns()
        self._changed: set[int] = set()  # inodes whose lower file changed since then
        self.gone: set[int] = set()  # inodes with a version whose lower file is gone
        self.lock = threading.RLock()
        self.hidden_names = HiddenNames(path_filter, lower, self.path)
        self.check_new_name = self.hidden_names.check_new
        self.device = seen.st_dev
        self._waiting: dict[int, tuple[Link, ...]] = {}  # numbers without an inode yet, their names
        self._kinds: dict[int, int] = {}  # of those, the type bits
        self.numbers_by_key: dict[tuple[int, int], int] = {}  # key of the lower layer -> number
        self._given: set[int] = set()  # the numbers given to names of the lower layer; none is given to a second file
        self._paths: dict[int, bytes] = {}  # directories of the lower layer: their path there
        self.table = InodeTable({}, self._make)
        self.ledger.leave(self.inodes[ROOT_INODE])
        self.inodes = self.table
        self._all_loaded = False
        self.recorded: dict[int, LowerFile] = {}  # inodes that a journal has, and their files as it has them
        self.listed: set[int] = set()  # directories whose entries a journal has
        self._recorded_names: dict[int, dict[bytes, int]] = {}  # directory -> name -> inode
        self._from_journal: set[int] = set()  # numbers that came from a journal, which does not have their keys
        self.known: KnownInodes | None = None  # what a successor needs to serve the same kernel
        # Called, under `lock`, with the links and the kind (0: gone) of a name that changed below since it was listed.
        self.on_correction: Callable[[tuple[Link, ...], int, int], None] | None = None
        # Called, under `lock`, with a directory that has numbers which the next mount could not give again.
        self.on_new_numbers: Callable[[int], None] | None = None
        root = self.table[ROOT_INODE] = self._loaded(ROOT_INODE, b"", seen)
        self.ledger.enter_new(root)
        self.ledger.charge_overhead(lower.memory_bytes)
        self.next_inode = FIRST_NEW_NUMBER

    # -- loading ---------------------------------------------------------------------------------
    def _fill(self, number: int) -> None:
        """Load the entries of the directory `number`.  OSError if it cannot be opened."""
        path = self._paths[number]
        self._check_memory()
        try:
            found = self.lower.scan(path)
        except OSError as error:
            if not is_gone(error):
                raise
            found = ()  # the lower directory was removed since its inode was loaded
        with self.lock:
            directory = self.table.loaded(number)
            if directory is None or not isinstance(directory.children, UnfilledChildren):
                return  # another thread was faster
            entries = self._recorded_names.pop(number, {})
            recorded = set(entries)
            prefix = path + b"/" if path else b""
            next_inode = self.next_inode
            for entry in found:
                is_directory = entry.kind == stat.S_IFDIR
                if entry.name in recorded or self.path_filter.hides(prefix + entry.name, is_directory=is_directory):
                    continue
                entries[entry.name] = self._give_number(number, entry)
            self._set_entries(directory, directory.children, entries)
            if self.known is not None:
                self.known.filled(number, entries, {entry.name: entry.key for entry in found})
            if self.next_inode != next_inode and self.on_new_numbers is not None:
                self.on_new_numbers(number)

    def _set_entries(self, directory: Inode, children: UnfilledChildren, entries: dict[bytes, int]) -> None:
        """Set the entries of a directory, the first time."""
        directory.nlink = 2 + sum(stat.S_ISDIR(self.kind(number)) for number in entries.values())
        children.become(entries)
        self.ledger.charge_overhead(sum(_LOWER_NAME_BYTES + len(name) for name in entries))

    def _check_memory(self) -> None:
        """Raise ENOMEM if no more of the lower layer can be loaded.

        The bound is an eighth above the limit, because a path must be loaded before it can be removed or restored.
        """
        limit = self.ledger.limit
        if limit is not None and self.ledger.total > limit + limit // 8:
            raise os_error(errno.ENOMEM)

    def _give_number(self, directory: int, entry: LowerEntry) -> int:
        """Return a new number for a name, or the number of the loaded file that has this further name."""
        link = directory, entry.name
        is_directory = entry.kind == stat.S_IFDIR
        if not is_directory:
            number = self.numbers_by_key.get(entry.key)
            if number is None and entry.number in self._from_journal:
                number = entry.number
            if number is not None and self._add_name(number, link):
                return number
        number = entry.number
        if number <= ROOT_INODE or number in self._given:
            number = self.next_inode
            self.next_inode += 1
        self._given.add(number)
        if not is_directory:
            self.numbers_by_key[entry.key] = number
        self._waiting[number] = (link,)
        self._kinds[number] = entry.kind
        return number

    def _add_name(self, number: int, link: Link) -> bool:
        """Record `link` as a further name of the file `number`; False if it is a name of another file."""
        waiting = self._waiting.get(number)
        if waiting is not None:
            self._waiting[number] = (*waiting, link)
            return True
        live = self.table.loaded(number)
        if live is None or live.nlink <= len(live.links):
            return False  # another file has reused the inode number
        self._put_name(number, link)
        return True

    def _put_name(self, number: int, link: Link) -> None:
        """Add a name to all versions of a loaded inode."""
        live = self.table.loaded(number)
        for version in self.versions(number):
            version.links = (*version.links, link)
            if version is live:
                self.ledger.metadata += ENTRY_BYTES + len(link[1])
            else:
                self.ledger.kept += VERSION_LINK_BYTES

    def _make(self, number: int) -> Inode:
        """Create the inode of an assigned number.  KeyError; FileNotFoundError if it no longer exists below.

        NotReadyError in the serving thread, as from `_fill`; other threads wait.
        """
        held: list[object] = []
        while True:
            try:
                return self._make_now(number)
            except NotReadyError as error:
                held.append(self.lower.wait(error))

    def _make_now(self, number: int) -> Inode:
        with self.lock:
            made = self.table.loaded(number)
            if made is not None:
                return made
            links = self._waiting[number]
            self._check_memory()
            directory, path = links[0][0], self._waiting_path(number)
            expected = None if self.known is None else self.known.expected(number)
            was = None if expected is None else expected.seen
            removed = self._removed_meanwhile(number)
            seen: LowerStat
            try:
                if removed is not None:
                    seen = removed
                    inode = self._inode(number, self.lower.file(path, seen), seen, None, None)
                    inode.lower.gone_ns = self._replaced_ns(path)
                    self.gone.add(number)
                elif expected is not None and not self.lower.can_change:
                    seen = expected.seen
                    inode = self._inode(number, self.lower.file(path, seen), seen, expected.xattrs, expected.target)
                else:
                    seen = self.lower.stat(path)
                    if was is not None and not self._is_same_file(seen, was):
                        seen = was  # as it was loaded first: the next check finds the change
                    inode = self._loaded(number, path, seen, directory)
            except OSError as error:
                if not is_gone(error):
                    raise
                if was is None or not stat.S_ISREG(was.st_mode):
                    self._vanished(number, links)
                    raise os_error(error.errno or 0, os.fsdecode(path)) from None
                seen = was
                inode = self._inode(number, self.lower.file(path, was), was, None, None)
            if was is not None and was.st_mode & TYPE_MASK == seen.st_mode & TYPE_MASK:
                inode.atime_ns = was.st_atime_ns
            inode.links = links
            if inode.children is None:
                inode.nlink = max(seen.st_nlink, len(links))
            self._correct_kind(number, directory, seen.st_mode & TYPE_MASK)
            del self._waiting[number], self._kinds[number]
            self._enter(inode)
            if self.known is not None:
                self.known.loaded(inode)
            return inode

    def _waiting_path(self, number: int) -> bytes:
        directory, name = self._waiting[number][0]
        above = self._paths[directory]
        return above + b"/" + name if above else name

    def named_in_journal(self) -> set[int]:
        """Return the inodes that are not loaded, and that a journal has by name only; none if there is no snapshot."""
        return self._from_journal & self._waiting.keys() if self.log.infos() else set()

    def _removed_meanwhile(self, number: int) -> LowerStat | None:
        """Return attributes for a file that was removed below since the last mount, if a snapshot may have it.

        The journal has only its name.  Its content is lost, and another type of file at its path is not this file.
        """
        if number not in self._from_journal or self._kinds[number] != stat.S_IFREG or not self.log.infos():
            return None
        found = self.stat(self._waiting_path(number))
        if found is not None and stat.S_ISREG(found.st_mode):
            return None
        above = self.table[self._waiting[number][0][0]]
        return RecordedStat(stat.S_IFREG | 0o644, 0, 0, 1, above.uid, above.gid, 1, 0, 0, 0, 0, 0)

    def _is_same_file(self, seen: LowerStat, was: LowerStat) -> bool:
        """Whether a file is unchanged, or has become another type of file, which is another inode."""
        is_same_type = seen.st_mode & TYPE_MASK == was.st_mode & TYPE_MASK
        return not is_same_type or self.lower.is_same(identity(seen), identity(was))

    def _enter(self, inode: OverlayInode) -> None:
        """Add an inode that was loaded."""
        if inode.nlink:
            self.count(inode, +1)
        else:
            self.orphans.add(inode.inode)
        self.ledger.enter_new(inode)
        self.ledger.charge_overhead(_LOWER_INODE_BYTES + 3 * len(inode.lower.path))
        self.table[inode.inode] = inode
        self.table.below += 1

    def _loaded(self, number: int, path: bytes, seen: LowerStat, directory: int = 0) -> OverlayInode:
        target = self.lower.readlink(path) if stat.S_ISLNK(seen.st_mode) else None
        file = self.lower.file(path, seen)
        above = self.table.loaded(directory)
        if isinstance(above, OverlayInode) and above.lower.changed_ns > above.lower.identity[3]:
            # Its ctime, and not its mtime, changed: it may have been renamed, and have had other files before.
            file.changed_ns = max(file.changed_ns, above.lower.changed_ns)
        return self._inode(number, file, seen, self.lower.xattrs(path), target)

    def _inode(
        self, number: int, file: LowerFile, seen: LowerStat, xattrs: Xattrs | None, target: bytes | None
    ) -> OverlayInode:
        inode = OverlayInode(number, seen.st_mode, seen.st_uid, seen.st_gid, 0, 0)
        inode.lower = file
        inode.set_size_and_times(seen)
        inode.xattrs = xattrs
        kind = seen.st_mode & TYPE_MASK
        if kind == stat.S_IFDIR:
            inode.children = UnfilledChildren(functools.partial(self._fill, number))
            inode.nlink = seen.st_nlink  # some file systems report 1 for "not counted"
            self._paths[number] = file.path
        elif kind == stat.S_IFREG:
            inode.content = LowerContent(inode.lower, self.ledger)
            if file.changed_ns > self._started_ns:
                self._changed.add(number)
        elif target is not None:
            inode.target = target
            inode.size = len(target)
        else:
            inode.rdev = seen.st_rdev
            inode.size = 0
        return inode

    def kind(self, number: int) -> int:
        """Return the type bits of an inode, loaded or not."""
        inode = self.table.loaded(number)
        if inode is not None:
            return inode.mode
        try:
            return self._kinds[number]
        except KeyError:  # another thread has just loaded it
            return self.table[number].mode

    def modes(self, numbers: list[int]) -> list[int]:
        """See `MemoryState.modes`.  Loads no inode."""
        return list(map(self.kind, numbers))

    def _correct_kind(self, number: int, directory: int, kind: int) -> None:
        """Correct the link counts above a name that has become, or is no longer, a directory since it was listed."""
        change = (kind == stat.S_IFDIR) - (self._kinds[number] == stat.S_IFDIR)
        if change:
            if self.known is not None:
                self.known.corrected(number, kind)
            if self.on_correction is not None:
                self.on_correction(self._waiting[number], number, kind)
            for version in self.versions(directory):
                version.nlink += change

    def _vanished(self, number: int, links: Iterable[Link]) -> None:
        """Drop the names of a file that no longer exists below, in all versions."""
        if self.known is not None:
            self.known.corrected(number, 0)
        if self.on_correction is not None:
            self.on_correction(tuple(links), number, 0)
        is_directory = self._kinds.pop(number) == stat.S_IFDIR
        del self._waiting[number]
        for directory, name in links:
            live = self.table.loaded(directory)
            if live is None or live.children is None or live.children.get(name) != number:
                continue
            counted = _counted_size(live.children)
            del live.children[name]
            if live.cookies is not None:
                live.cookies.remove(name)
            for version in self.versions(directory):
                version.nlink -= is_directory
                if version.size == counted:
                    version.size -= DIRECTORY_ENTRY_BYTES

    def versions(self, number: int) -> Iterator[Inode]:
        """Yield all versions of a loaded inode: the live one, and those that snapshots hold."""
        live = self.table.loaded(number)
        if live is not None:
            yield live
        for epoch in self.log.epochs():
            version = epoch.inodes.get(number)
            if version is not None and version is not live:
                yield version

    def find_links(self, numbers: Iterable[int]) -> None:
        """See `MemoryState.find_links`.  If a name is missing, loads every directory, once."""
        if self._all_loaded:
            return
        for number in numbers:
            if any(
                version.children is None and version.nlink > len(version.links) for version in self.versions(number)
            ):
                self._load_all()
                return

    def _load_all(self) -> None:
        todo = [ROOT_INODE]
        while todo:
            directory = self.table.get(todo.pop())
            if directory is None or directory.children is None:
                continue
            try:
                numbers = list(directory.children.copy().values())
            except PermissionError:
                continue
            todo += [number for number in numbers if self.kind(number) & TYPE_MASK == stat.S_IFDIR]
        self._all_loaded = True

    # -- loading from a journal ------------------------------------------------------------------
    def recorded_names(self, directory: int) -> dict[bytes, int]:
        """Return the names in a directory, whose entries were not read yet, of inodes that a journal has."""
        return self._recorded_names.get(directory, {})

    def put_recorded(
        self,
        number: int,
        file: LowerFile,
        seen: LowerStat,
        links: tuple[Link, ...],
        xattrs: Xattrs | None,
        target: bytes | None,
    ) -> None:
        """Load an inode as it was when it was recorded; versions without changes follow the file."""
        self.recorded[number] = file
        live = self.table.loaded(number)
        if isinstance(live, OverlayInode):
            old = live.lower.identity
            for version in list(self.versions(number)):
                if isinstance(version, OverlayInode) and version.follows(old):
                    self._follow(version, file, seen, xattrs, is_live=version is live)
            if isinstance(live.children, UnfilledChildren):
                live.nlink = seen.st_nlink
            return
        inode = self._inode(number, file, seen, xattrs, target)
        inode.nlink = seen.st_nlink
        waiting = self._waiting.pop(number, ())
        self._kinds.pop(number, None)
        inode.links = (*waiting, *(link for link in links if link not in waiting))
        for directory, name in links:
            if directory not in self.listed:
                self._recorded_names.setdefault(directory, {})[name] = number
        self._given.add(number)
        self._from_journal.add(number)
        self._enter(inode)
        if self.known is not None:
            self.known.drop(number)

    def put_listing(self, number: int, listing: Iterable[tuple[bytes, int, int]]) -> None:
        """Load the entries of a directory as they were when they were recorded: name, number and kind of each."""
        self.listed.add(number)
        self._put_entries(self.table[number], listing)

    def put_filled(self, number: int, rows: Sequence[tuple[bytes, int, int, tuple[int, int] | None]]) -> None:
        """Load the entries of a directory that the kernel knows from the predecessor: with the key of each file.

        Does nothing for a directory that is gone, or was loaded from a journal.
        """
        directory = self.table.get(number)
        if directory is None or not isinstance(directory.children, UnfilledChildren):
            return
        self._put_entries(directory, (row[:3] for row in rows))
        for _, child, kind, key in rows:
            if key is not None and kind != stat.S_IFDIR:
                self.numbers_by_key.setdefault(key, child)
            if child >= self.next_inode:
                self.next_inode = child + 1

    def _put_entries(self, directory: Inode, listing: Iterable[tuple[bytes, int, int]]) -> None:
        number, children = directory.inode, directory.children
        if not isinstance(children, UnfilledChildren):
            return
        self._recorded_names.pop(number, None)
        entries = {}
        for name, child, kind in listing:
            link = number, name
            entries[name] = child
            live = self.table.loaded(child)
            waiting = self._waiting.get(child)
            if live is not None:
                if link not in live.links:
                    self._put_name(child, link)
            elif waiting is not None:
                self._waiting[child] = (*waiting, link)
            else:
                self._waiting[child] = (link,)
                self._kinds[child] = kind
                self._given.add(child)
                self._from_journal.add(child)
        self._set_entries(directory, children, entries)

    def correct(self, number: int, kind: int) -> None:
        """Correct the kind of a listed name (0: it is gone below), as loading it did when this was recorded."""
        links = self._waiting.get(number)
        if links is None:
            return
        if kind:
            self._correct_kind(number, links[0][0], kind)
            self._kinds[number] = kind
        else:
            self._vanished(number, links)

    # -- handover ----------------------------------------------------------------------------------
    def sums(self) -> dict[str, int]:
        """See `MemoryState.sums`.  Without the inodes of the lower layer: the processes have not loaded the same."""
        own = [inode for inode in dict.values(self.table) if not isinstance(inode, OverlayInode)]
        return {
            **super().sums(),
            "files": sum(not inode.is_dir for inode in own),
            "directories": sum(inode.is_dir for inode in own),
            "bytes": sum(inode.size for inode in own if inode.is_file and inode.nlink),
        }

    def set_atime(self, number: int, atime_ns: int) -> None:
        """See `MemoryState.set_atime`."""
        inode = self.table.loaded(number)
        if inode is not None:
            inode.atime_ns = atime_ns
        elif self.known is not None:
            self.known.set_atime(number, atime_ns)

    # -- changes of the lower directory ----------------------------------------------------------
    def refresh(self, number: int, *, notices_removal: bool = True) -> tuple[bool, bool]:
        """Compare a file with the lower directory, and follow it if it changed there.

        Return whether the live version follows the lower file, and whether the file differs from the loaded one.  A
        live version that was changed in the overlay does not follow: the lower content that it was based on is gone.
        Then no other version follows either, in particular not the base's: its identity is the one that the workspace
        showed when it first changed the file, and `apply` compares with that.  Nor does any version follow if the file
        was removed, or replaced by something other than a file.  A file that only snapshots have is checked, too.
        Without `notices_removal`, a file that was removed is left as it is.
        """
        with self.lock:
            live = self.table.loaded(number)
            if not isinstance(live, OverlayInode):
                if number in self._waiting and self._removed_meanwhile(number) is not None:
                    self.table.get(number)
                self._note_gone(number)  # only snapshots have it
                return False, False
            old = live.lower
            if old.kept is not None or not self.lower.can_change:
                return True, False  # with `kept`, an apply replaced the file below, and this version keeps its content
            seen = self.stat(old.path)
            if seen is None and not notices_removal:
                return False, False
            if seen is not None and self.lower.is_same(identity(seen), old.identity):
                if number in self.gone:
                    self._note_gone(number)
                return True, False
            if (
                seen is None
                or seen.st_mode & TYPE_MASK != live.mode & TYPE_MASK
                or not live.nlink
                or not live.follows(old.identity)
            ):
                self._note_gone(number)
                return False, True
            new = self._file_now(old, seen)
            new.earlier = self._earlier(live, new.changed_ns)
            self._changed.add(number)
            self.gone.discard(number)
            xattrs = self.lower.xattrs(old.path)
            for version in list(self.versions(number)):
                if isinstance(version, OverlayInode) and version.follows(old.identity):
                    self._follow(version, new, seen, xattrs, is_live=version is live)
            if self.known is not None and live.lower is new:
                self.known.loaded(live)
            return live.lower is new, True

    def stat(self, path: bytes) -> LowerStat | None:
        """Return the attributes of a path below; None if there is nothing."""
        try:
            return self.lower.stat(path)
        except OSError as error:
            if not is_gone(error):
                raise
            return None

    def _file_now(self, old: LowerFile, seen: LowerStat) -> LowerFile:
        """Return the file that is now at the path of `old`, and differs from it."""
        new = self.lower.file(old.path, seen)
        if new.identity[:2] != old.identity[:2]:
            new.changed_ns = max(new.changed_ns, self._replaced_ns(old.path))
        return new

    def _earlier(self, live: Inode, until_ns: int) -> tuple[EarlierState, ...]:
        """Return the states of a file, `live` the last one, that a snapshot before `until_ns` was taken of."""
        assert isinstance(live, OverlayInode)
        file = live.lower
        states = *file.earlier, EarlierState(file, live.mode, live.uid, live.gid, live.xattrs or {})
        ends = *(state.file.changed_ns for state in states[1:]), until_ns
        taken = [info.created_ns for info in self.log.infos()]
        file.earlier = ()
        return tuple(
            state
            for state, end in zip(states, ends, strict=True)
            if any(state.file.changed_ns <= time_ns < end for time_ns in taken)
        )

    def _files(self, number: int) -> set[LowerFile]:
        """Return the files of the lower layer that the versions of an inode are read from."""
        found = {file for version in self.versions(number) for file in lower_files(version)}
        return {file for file in found if file.kept is None and file.changed_ns != LOST_NS}

    def _note_gone(self, number: int) -> None:
        """Note which states of a file that some version of it has are no longer below, or are there again."""
        self.gone.discard(number)
        for file in self._files(number) if self.lower.can_change else ():
            seen = self.stat(file.path)
            if seen is not None and self.lower.is_same(identity(seen), file.identity):
                file.gone_ns = 0
                continue
            self.gone.add(number)
            if not file.gone_ns:
                replaced_ns = self._replaced_ns(file.path)
                file.gone_ns = replaced_ns if seen is None else self._file_now(file, seen).changed_ns or replaced_ns

    def _follow(
        self, inode: OverlayInode, new: LowerFile, seen: LowerStat, xattrs: Xattrs | None, *, is_live: bool
    ) -> None:
        ledger = self.ledger
        uncharge, charge = (ledger.leave, ledger.enter_new) if is_live else (ledger.leave_old, ledger.enter_old)
        uncharge(inode)
        inode.lower = new
        inode.mode, inode.uid, inode.gid = seen.st_mode, seen.st_uid, seen.st_gid
        inode.xattrs = None if xattrs is None else dict(xattrs)  # versions share a dict only if the ledger counts it
        if inode.content is not None:
            inode.content = LowerContent(new, ledger)
            if is_live:
                self.resize(inode, seen.st_size)
        inode.set_size_and_times(seen)
        charge(inode)

    def _replaced_ns(self, path: bytes) -> int:
        """Return a time that is not before the one at which `path` became the name of another file.

        A rename of a directory above gives only that directory another ctime.
        """
        newest = 0
        while path:
            path = path.rpartition(b"/")[0]
            above = self.stat(path)
            newest = max(newest, 0 if above is None else above.st_ctime_ns)
        return min(newest, time.time_ns())

    def changed_since(self, time_ns: int) -> list[int]:
        """Return the inodes whose lower file another program changed or removed since, as far as that was noticed."""
        with self.lock:
            numbers = self._changed if time_ns >= self._started_ns else self.table.keys()
            found = [(number, self.table.loaded(number)) for number in numbers]
            gone = [number for number in self.gone if any(file.gone_ns > time_ns for file in self._files(number))]
        return [
            *(number for number, live in found if isinstance(live, OverlayInode) and live.lower.changed_ns > time_ns),
            *gone,
        ]

    def lose(self, number: int, was: TreeEntry) -> None:
        """Make the content of a live file unreadable: it is no longer below, and what is there now is another one's.

        It gets the attributes of `was`.
        """
        live = self.own(self.table[number])
        assert isinstance(live, OverlayInode)
        live.mode, live.uid, live.gid, live.mtime_ns, live.ctime_ns = (
            was.mode,
            was.uid,
            was.gid,
            was.mtime_ns,
            was.ctime_ns,
        )
        if (live.xattrs or {}) != dict(was.xattrs):
            self.ledger.set_xattrs(live, dict(was.xattrs) or None)
        self.resize(live, max(was.size, 1))  # so that every reader meets the error
        seen = RecordedStat(0, 0, 0, 0, 0, 0, live.size, 0, 0, LOST_NS, live.lower.sectors, 0)
        live.lower = self.lower.file(live.lower.path, seen)
        self.swap_content(live, LowerContent(live.lower, self.ledger), shared=False)

    def renew(self, renewed: Mapping[tuple[int, int], Identity]) -> None:
        """Take over the identities of inodes whose ctime an apply changed, by (st_dev, st_ino)."""
        with self.lock:
            numbers = set(self.table).union(*(epoch.inodes for epoch in self.log.epochs())) if renewed else ()
            for number in numbers:
                for file in {file for version in self.versions(number) for file in lower_files(version)}:
                    now = renewed.get(file.identity[:2])
                    if now is not None and now[2] == file.identity[2]:
                        file.identity = now
                        self.lower.evict(file)

    # -- changes ---------------------------------------------------------------------------------
    def own(self, inode: Inode) -> Inode:
        """See `MemoryState.own`.

        Every change of an inode calls this first.  Afterwards its `lower` stays the same (see `refresh`), and any
        change of the lower file gives it a ctime other than the one in the identity.
        """
        if inode.epoch != self.epoch and isinstance(inode, OverlayInode):
            if isinstance(inode.children, UnfilledChildren):
                inode.children.fill()
            elif inode.children is None and self.lower.can_change:
                statx.outlast_tick(inode.lower.identity[4])
        return super().own(inode)

    def revive(self, version: Inode) -> Inode:
        if isinstance(version, OverlayInode) and self.table.loaded(version.inode) is None:
            self.table.below += 1
        return super().revive(version)

    def add_entry(self, directory: Inode, name: bytes, inode: Inode) -> None:
        """See `MemoryState.add_entry`.  EPERM for a name that is hidden."""
        self.hidden_names.check(directory, name, is_directory=inode.children is not None)
        _count_entries(directory)
        super().add_entry(directory, name, inode)

    def drop_entry(self, directory: Inode, name: bytes, inode: Inode) -> None:
        _count_entries(directory)
        super().drop_entry(directory, name, inode)

    def move_entry(
        self, old: Inode, old_name: bytes, new: Inode, new_name: bytes, inode: Inode, victim: Inode | None
    ) -> None:
        _count_entries(old)
        _count_entries(new)
        super().move_entry(old, old_name, new, new_name, inode, victim)


def _count_entries(directory: Inode) -> None:
    assert directory.children is not None
    directory.size = _counted_size(directory.children)


def _counted_size(children: Mapping[bytes, int]) -> int:
    return DIRECTORY_BASE_BYTES + DIRECTORY_ENTRY_BYTES * len(children)
