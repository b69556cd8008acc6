"""SnapshotCatalog: the records of a store's snapshots, by workspace and name.

Threading: any thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from protocol.errors import SnapshotExistsError, SnapshotNotFoundError
from protocol.linux.regular_file import read_prefix, write_atomically
from protocol.store.format.packs import DamagedError
from protocol.store.format.records import Record, pack_name, read_record, workspace_and_serial

if TYPE_CHECKING:
    from protocol.store.format.layout import Layout
    from protocol.store.format.packs import Pack, Packs


class SnapshotCatalog:
    """Reads the records from the packs, and keeps them until the packs change."""

    def __init__(self, layout: Layout, packs: Packs) -> None:
        self._layout = layout
        self._packs = packs
        self._by_pack: dict[str, Record] = {}
        self._by_workspace: dict[str, tuple[int, dict[str, Record]]] = {}  # with the version of the packs

    def of(self, workspace: str) -> dict[str, Record]:
        """The snapshots of a workspace by name, oldest first, without damaged ones."""
        if not self._layout.exists():
            return {}
        self._packs.refresh()
        version, found = self._by_workspace.get(workspace, (-1, {}))
        if version != self._packs.version:
            version = self._packs.version
            found = {record.name: record for record in self._readable(self._prefix(workspace))}
            self._by_workspace[workspace] = version, found
        return found

    def all(self) -> list[Record]:
        """All snapshots, by workspace and oldest first, without damaged ones."""
        if not self._layout.exists():
            return []
        self._packs.refresh()
        return self._readable("")

    def get(self, workspace: str, name: str) -> Record:
        """One snapshot.  SnapshotNotFoundError; DamagedError if a damaged snapshot may be the one."""
        record = self.of(workspace).get(name)
        if record is not None:
            return record
        for path, error in self.damaged(workspace).items():
            raise DamagedError(f"a snapshot of this workspace is damaged ({error.damage})", path)
        raise SnapshotNotFoundError(name)

    def check_new(self, workspace: str, name: str) -> None:
        """SnapshotExistsError if the workspace has a snapshot of that name."""
        if name in self.of(workspace):
            raise SnapshotExistsError(name)

    def damaged(self, workspace: str | None = None) -> dict[str, DamagedError]:
        """The damage of each snapshot that cannot be read, by the path of its pack; None: of all workspaces."""
        prefix = "" if workspace is None else self._prefix(workspace)
        found = {
            name: error
            for name, error in self._packs.damaged.items()
            if name.startswith(prefix) and workspace_and_serial(name) is not None
        }
        for pack in self._snapshot_packs(prefix):
            try:
                self._read(pack)
            except DamagedError as error:
                found[pack.name] = error
        return {os.path.join(self._layout.packs, name): error for name, error in found.items()}

    def path(self, workspace: str, serial: int) -> str:
        """The path of a snapshot's pack."""
        return os.path.join(self._layout.packs, pack_name(self._layout.workspace_id(workspace), serial))

    def next_serial(self, workspace: str) -> int:
        """A serial number that the workspace never used.  The caller holds the naming lock."""
        path = os.path.join(self._layout.workspace(workspace), "serial")
        prefix = self._prefix(workspace)
        serial = 0
        with contextlib.suppress(FileNotFoundError, ValueError):
            serial = int(read_prefix(path))
        for name in os.listdir(self._layout.packs):
            if name.startswith(prefix):
                serial = max(serial, int(name[len(prefix) :].partition(".")[0]))
        write_atomically(path, b"%d" % (serial + 1), durable=False)
        return serial + 1

    def _prefix(self, workspace: str) -> str:
        return self._layout.workspace_id(workspace) + "-"

    def _snapshot_packs(self, prefix: str) -> Iterator[Pack]:
        for pack in self._packs.all():
            if pack.name.startswith(prefix) and workspace_and_serial(pack.name) is not None:
                yield pack

    def _readable(self, prefix: str) -> list[Record]:
        found = []
        for pack in self._snapshot_packs(prefix):
            with contextlib.suppress(DamagedError):  # `damaged` has it
                found.append(self._read(pack))
        return sorted(found, key=lambda record: (record.workspace, record.serial))

    def _read(self, pack: Pack) -> Record:
        cached = self._by_pack.get(pack.name)
        if cached is None:
            cached = self._by_pack[pack.name] = read_record(pack)
        return cached
