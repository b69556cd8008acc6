"""The methods of the control socket that work on content: snapshots, diffs, files, commands, and the unmount.

They import the archive, store, search and diff code, so the daemon imports this module after the mount answers
(`vfsd.daemon.preload`).
"""

from __future__ import annotations

from collections.abc import Mapping

from vfsd.daemon.audit.service import Audit
from vfsd.daemon.control.call_context import Handler
from vfsd.daemon.control.handlers.audit import AuditMethods
from vfsd.daemon.control.handlers.exec import ExecMethods
from vfsd.daemon.control.handlers.fork import ForkMethod
from vfsd.daemon.control.handlers.fs import FsMethods
from vfsd.daemon.control.handlers.merge import MergeMethods
from vfsd.daemon.control.handlers.merge_source import MergeSource
from vfsd.daemon.control.handlers.snapshots import SnapshotMethods
from vfsd.daemon.control.handlers.trees import TreeMethods
from vfsd.daemon.control.handlers.unmount import UnmountMethods
from vfsd.daemon.control.handlers.whole import compact_method, policy_method, save_method
from vfsd.daemon.exec.commands import Commands
from vfsd.daemon.forks.forks import Forks
from vfsd.daemon.merging.other import OtherWorkspaces
from vfsd.daemon.mounted_volume import MountedVolume
from vfsd.daemon.snapshots.base import SnapshotService
from vfsd.daemon.upgrading.giving import OldDaemon, Upgrade
from vfsd.wire.options import WorkspaceOptions


class MethodGroups:
    """The groups of methods of one workspace.  `snapshots` is None if its backend has none."""

    def __init__(
        self,
        mounted: MountedVolume,
        snapshots: SnapshotService | None,
        options: WorkspaceOptions,
        commands: Commands,
        forks: Forks,
        audit: Audit,
        daemon: OldDaemon,
    ) -> None:
        self._unmount = UnmountMethods(mounted, options, commands, forks, daemon.removal.wait)
        source = MergeSource(mounted, snapshots, options, forks)
        others = OtherWorkspaces(mounted.volume, source.lineage, source.tree, forks.temporary)
        self.handlers: Mapping[str, Handler] = {
            "unsaved": self._unmount.unsaved,
            "unmount": self._unmount.unmount,
            "compact": compact_method(mounted, forks),
            "upgrade": Upgrade(daemon, mounted, snapshots, commands).upgrade,
            "policy": policy_method(mounted),
            "save": save_method(snapshots, options, mounted),
            "fork": ForkMethod(mounted, snapshots, forks).fork,
            **SnapshotMethods(mounted, snapshots, options, forks).handlers(),
            **TreeMethods(mounted, snapshots, options, forks.base, others).handlers(),
            **source.handlers(),
            **MergeMethods(mounted, source, options, others).handlers(),
            **AuditMethods(audit, snapshots).handlers(),
            **FsMethods(mounted, options, commands, snapshots).handlers(),
            **ExecMethods(commands).handlers(),
        }

    @property
    def unmounts_to_answer(self) -> int:
        """Unmounts that were made and whose answers are not sent yet."""
        return self._unmount.to_answer
