"""weakincentives (WINK): a workspace as the filesystem and the prompt section of its agents.

    section = VfsdWorkspaceSection(session=session, mounts=[HostMount(host_path="project")])
    before = section.checkpoints.snapshot("turn-1")  # the session's state and all files, in milliseconds
    ...
    section.checkpoints.restore("turn-1")  # both, also in a later program
    section.cleanup()

Needs the extra `weakincentives` and Python 3.12.  The extra is pinned to one minor version, because the section uses
private parts of WINK's own section: its host mounts and the arguments with which it clones itself.

filesystem    VfsdFilesystem, a subclass of WINK's HostFilesystem, rooted at the mount
section       VfsdWorkspaceSection: mounts the workspace, and has its files, tools and snapshots; dump_session_tree
tools         vfsd's tools as WINK's
snapshots     FilesystemSnapshotManager: snapshots as archives, with WINK's semantics; Checkpoints: one id for the
              session's state and the files
"""

from protocol.drafts import SnapshotInfo
from vfsd.integrations.weakincentives.filesystem import VfsdFilesystem, WorkspaceUnavailableError
from vfsd.integrations.weakincentives.section import FilesystemSnapshotRef, VfsdWorkspaceSection, dump_session_tree
from vfsd.integrations.weakincentives.snapshots import Checkpoints, FilesystemSnapshotManager

__all__ = [
    "Checkpoints",
    "FilesystemSnapshotManager",
    "FilesystemSnapshotRef",
    "SnapshotInfo",
    "VfsdFilesystem",
    "VfsdWorkspaceSection",
    "WorkspaceUnavailableError",
    "dump_session_tree",
]
