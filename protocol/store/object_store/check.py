"""Check of a remote store: reads everything, and names what is damaged with the snapshots and paths that need it.

Threading: one thread.  Pushes and collections may run meanwhile: what they add is not checked, and what they delete is
not damage.
"""

from __future__ import annotations

import stat
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from protocol.store.format.digests import CHUNK_BYTES
from protocol.store.format.packs import DamagedError, Pack
from protocol.store.format.rows import Row
from protocol.store.object_store.layout import (
    PACK_BYTES,
    PACKS,
    check_blob,
    decode_chunk_map,
    decode_listing_of,
    kind_of,
)
from protocol.store.upkeep import GONE, CheckReport, Damage, Losses

if TYPE_CHECKING:
    from protocol.store.object_store.packs import PackView
    from protocol.store.object_store.remote import RemoteSnapshot, RemoteStore
    from protocol.tree import ByteProgress

_IN_FLIGHT_BYTES: Final = 4 * PACK_BYTES  # more only if one pack is larger


def check(remote: RemoteStore, progress: ByteProgress) -> CheckReport:
    """Read the whole store.  ENOENT if there is none."""
    damages: list[Damage] = []
    # The names first: what they need was there before they were published, and stays.
    newest = remote.newest()
    remote.require()
    snapshots = remote.records(
        newest.values(), lambda one, error: damages.append(Damage(error.damage, (("", one.name),)))
    )
    for _ in range(2):
        run = _Check(remote, progress)
        damages_found = run.run(snapshots)
        if not damages_found:
            break
        # A collection may have moved contents while this check read them; a second run finds only real damage.
        later = remote.newest()
        snapshots = [one for one in snapshots if later.get(one.name) == one.generation]
    return CheckReport(len(snapshots), run.contents, run.size_bytes, (*damages, *damages_found))


class _Check:
    def __init__(self, remote: RemoteStore, progress: ByteProgress) -> None:
        self._remote = remote
        self._progress = progress
        self._whole: set[bytes] = set()
        self._bad: dict[bytes, str] = {}
        self._metadata: dict[bytes, bytes] = {}
        self.contents = 0
        self.size_bytes = 0

    def run(self, snapshots: list[RemoteSnapshot]) -> list[Damage]:
        """Read everything; return the damage."""
        view = self._remote.packs.view()
        damages = [Damage(f"{name}: {error.damage}") for name, error in view.damaged.items()]
        self._read(view)
        losses = Losses()
        for one in snapshots:
            record = one.record
            losses.add((record.workspace, one.name), self._lost(record.root))
            if record.inodes is not None:
                losses.add((record.workspace, one.name), self._lost(record.inodes), only_inodes=True)
        lost = losses.damages()
        needed = {damage.what for damage in lost}
        damages += [Damage(why) for why in dict.fromkeys(self._bad.values()) if why not in needed]
        return damages + lost

    def _read(self, view: PackView) -> None:
        """Compare every blob with its digest."""
        total = sum(pack.size_bytes for pack in view.packs.values())
        waiting: deque[tuple[Pack, Future[bytes]]] = deque()
        for pack in view.packs.values():
            while waiting and sum(each.size_bytes for each, _ in waiting) + pack.size_bytes > _IN_FLIGHT_BYTES:
                self._compare(*waiting.popleft(), total)
            waiting.append((pack, self._remote.storage.read(f"{PACKS}/{pack.name}")))
        while waiting:
            self._compare(*waiting.popleft(), total)
        self._bad = {digest: why for digest, why in self._bad.items() if digest not in self._whole}

    def _compare(self, pack: Pack, answer: Future[bytes], total: int) -> None:
        try:
            data = answer.result()
        except FileNotFoundError:
            return  # collected since it was listed
        for digest, place in pack.places():
            blob = data[place.offset : place.offset + place.length]
            try:
                check_blob(digest, blob)
            except DamagedError:
                self._bad[digest] = f"a content in {pack.name} is not what was stored"
                continue
            self._whole.add(digest)
            if kind_of(pack.name) == "tree":
                self._metadata[digest] = blob
        self.contents += pack.entries
        self.size_bytes += pack.size_bytes
        self._progress(self.size_bytes, total)

    def _lost(self, root: Row) -> list[tuple[bytes, str]]:
        """The damaged paths of a snapshot, with the reason."""
        wrong = []
        pending = [(b"", root)]
        seen: set[bytes] = set()
        while pending:
            path, row = pending.pop()
            if not row.content or row.is_symlink or row.content in seen:
                continue
            why = self._damage_of(row)
            if why is not None:
                wrong.append((path, why))
                continue
            if stat.S_ISDIR(row.mode):
                seen.add(row.content)
                prefix = path + b"/" if path else b""
                try:
                    rows = decode_listing_of(row.content, self._metadata.get(row.content, b""))
                except DamagedError as error:
                    wrong.append((path, error.damage))
                    continue
                pending += [(prefix + below.name, below) for below in reversed(rows)]
        return wrong

    def _damage_of(self, row: Row) -> str | None:
        """Why an entry cannot be read; None if it can."""
        digests = [row.content]
        if stat.S_ISREG(row.mode) and row.size > CHUNK_BYTES and row.content in self._whole:
            data = self._metadata.get(row.content)
            found = None if data is None else decode_chunk_map(row.content, data)
            if found is None or found.size != row.size:
                return "a content has another size than its file"
            digests += found.chunks.values()
        for digest in digests:
            if digest not in self._whole:
                return self._bad.get(digest, GONE)
        return None
