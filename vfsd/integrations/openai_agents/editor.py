"""OpenAI Agents SDK: the editor of `ApplyPatchTool` for the files of a workspace.

    with Workspace.mount("/tmp/agent", "overlay:project") as ws:
        agent = Agent(name="coder", tools=[ApplyPatchTool(editor=VfsdEditor(ws))])

Files are changed through the mount, and no path leads outside it.  Each change of a file is complete, or does not
happen.

Threading: any thread; no state but the workspace's.
"""

from __future__ import annotations

import posixpath
from typing import Final

from agents import ApplyPatchOperation, ApplyPatchResult, apply_diff

from vfsd.client.workspace import Workspace
from vfsd.integrations.files import files_of


class VfsdEditor:
    """Implements `agents.ApplyPatchEditor`.  Paths are relative to the workspace, or absolute and below its mountpoint.

    A change that cannot be made is a result with the status "failed", which the model sees.  ConnectionError if the
    workspace is not mounted any more or its daemon is gone.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace: Final = workspace
        self._files: Final = files_of(workspace)

    def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        """Create a file; "failed" if it exists."""
        return self._change(operation)

    def update_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        """Apply a diff to a file of UTF-8 text, and move the file if `move_to` is set."""
        return self._change(operation)

    def delete_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        """Delete a file or a symlink; "failed" for a directory."""
        return self._change(operation)

    def _change(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        try:
            return ApplyPatchResult(status="completed", output=self._changed(operation))
        except ConnectionError:
            raise
        except (OSError, ValueError) as error:
            return ApplyPatchResult(status="failed", output=f"{operation.path}: {error}")

    def _changed(self, operation: ApplyPatchOperation) -> str:
        path, diff = self._below(operation.path), operation.diff or ""
        if operation.type == "create_file":
            self._files.write_bytes(path, apply_diff("", diff, mode="create").encode(), mode="create")
            return f"Created {path}"
        if operation.type == "delete_file":
            self._files.delete(path)
            return f"Deleted {path}"
        with self._files.open_read(path) as reader:
            content = apply_diff(reader.read().decode("utf-8"), diff).encode()
        target = path if operation.move_to is None else self._below(operation.move_to)
        if target == path:
            self._files.write_bytes(path, content)
            return f"Updated {path}"
        self._files.write_bytes(target, content, mode="create")
        self._files.delete(path)
        return f"Updated {path} and moved it to {target}"

    def _below(self, path: str) -> str:
        """Return `path` relative to the workspace.  ValueError if it leads outside."""
        name = posixpath.relpath(posixpath.join(self._workspace.path, path), self._workspace.path)
        if name == ".." or name.startswith("../"):
            raise ValueError(f"outside the workspace {self._workspace.path}")
        return name
