"""deepagents: a running workspace as a sandbox backend, with sync and async methods.

    with Workspace.mount("/tmp/agent", exec_on_host=True) as ws:
        agent = create_deep_agent(model=model, backend=VfsdSandbox(ws))
        ws.snapshot("before")
        agent.invoke({"messages": [("user", "Fix the tests")]})

Commands run where the workspace runs them: on this host (`exec_on_host=True`), which isolates nothing, or in a
container (`sandbox="image:REF"`).  Listing, reading, editing and searching are `BaseSandbox`'s own, which runs commands
for them.  Uploads, downloads and large edits go through the mount and do not leave it.

A path of the tools is a path of the workspace: "/" is its root, where deepagents has "/a.txt" for "a.txt".  Only a path
below the directory that commands see is used as it is, so that paths of their output can be passed on.

Threading: any thread, any event loop; it has no state but the workspace's name.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import posixpath
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from deepagents.backends.protocol import (
    FILE_NOT_FOUND,
    INVALID_PATH,
    IS_DIRECTORY,
    PERMISSION_DENIED,
    EditResult,
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
)
from deepagents.backends.sandbox import BaseSandbox

from protocol.execution.executor import ExecResult
from protocol.tools.edits import edit_file
from vfsd.client.arguments import running_workspace
from vfsd.client.async_connection import abandon, finish
from vfsd.client.async_workspace import AsyncWorkspace
from vfsd.client.workspace import Workspace
from vfsd.integrations.files import files_of, name_of, shell_status

P = ParamSpec("P")
T = TypeVar("T")

OUTPUT_BYTES: Final = 16 << 20  # of a command, at most; what one answer of the daemon may have
_LONGEST_S: Final = 86_400
_TIMED_OUT: Final = 124  # as timeout(1)
_CANNOT_RUN: Final = 126
# "$1" is the line.  One stream, so that output and errors are in the order in which they were written.
_SHELL: Final = ("sh", "-c", 'exec 2>&1; exec sh -c "$1"', "sh")
_ERRORS: Final[Mapping[type[Exception], str]] = {
    FileNotFoundError: FILE_NOT_FOUND,
    PermissionError: PERMISSION_DENIED,
    IsADirectoryError: IS_DIRECTORY,
    NotADirectoryError: INVALID_PATH,
    ValueError: INVALID_PATH,
}


def _of_workspace(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method of `BaseSandbox` take a path of the workspace.  Its root, for a path that is left out."""
    signature = inspect.signature(method)
    name = "file_path" if "file_path" in signature.parameters else "path"

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(*args, **kwargs)
        bound.arguments[name] = bound.arguments["self"].inside(bound.arguments.get(name) or "/")
        return method(*bound.args, **bound.kwargs)

    return called


class VfsdSandbox(BaseSandbox):
    """Implements `SandboxBackendProtocol` for a workspace: an object, or what `Workspace.attach` takes.

    `timeout_s` is the time limit of commands for which the agent names none; `env` is added to their environment.

    FileNotFoundError if the workspace is not running; OSError (EOPNOTSUPP) if it was mounted without a way to run
    commands.  If its daemon dies later, the methods raise ConnectionError.
    """

    def __init__(
        self,
        workspace: Workspace | AsyncWorkspace | str,
        *,
        timeout_s: int = 120,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s}")
        record = running_workspace(name_of(workspace))
        self.workspace: Final = Workspace(record, unmount_at_exit=False)
        self._async: Final = AsyncWorkspace(record, unmount_at_exit=False)
        self._timeout_s: Final = timeout_s
        self._env: Final = dict(env or {})
        self._files: Final = files_of(self.workspace)
        # The workspace's directory, as its commands see it.
        self.root: Final = self.workspace.executor.run(["pwd", "-P"]).stdout.decode().rstrip("\n")

    @property
    def id(self) -> str:
        """The workspace's name."""
        return self.workspace.name

    # -- commands -----------------------------------------------------------------------------
    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a shell line in the workspace's directory.

        Output and errors are one stream of at most 16 MiB.  The exit status of a command that ran for longer than
        `timeout` seconds is 124; with 0 there is no limit.  When the line has ended, no process that it started runs.
        """
        try:
            done = self.workspace.executor.run([*_SHELL, command], **self._limits(timeout))
        except OSError as error:
            return _cannot_run(error)
        return self._response(done, timeout)

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """As `execute`.  Cancelling it kills the command."""
        try:
            done = await self._async.async_executor.run([*_SHELL, command], **self._limits(timeout))
        except OSError as error:
            return _cannot_run(error)
        return self._response(done, timeout)

    def _limits(self, timeout_s: int | None) -> dict[str, Any]:
        chosen = self._timeout_s if timeout_s is None else timeout_s
        if chosen < 0:
            raise ValueError(f"a timeout must not be negative: {chosen}")
        return {
            "env": self._env,
            "timeout_s": min(chosen or _LONGEST_S, _LONGEST_S),
            "output_limit_bytes": OUTPUT_BYTES,
        }

    def _response(self, done: ExecResult, timeout_s: int | None) -> ExecuteResponse:
        output = (done.stdout + done.stderr).decode("utf-8", "replace")
        if done.timed_out:
            chosen = self._timeout_s if timeout_s is None else timeout_s
            output += f"\nError: the command was killed after {chosen} seconds.  Pass a longer timeout."
            return ExecuteResponse(output, _TIMED_OUT, done.truncated)
        return ExecuteResponse(output, shell_status(done.exit_status), done.truncated)

    # -- files --------------------------------------------------------------------------------
    ls, als = _of_workspace(BaseSandbox.ls), _of_workspace(BaseSandbox.als)
    read, aread = _of_workspace(BaseSandbox.read), _of_workspace(BaseSandbox.aread)
    write, awrite = _of_workspace(BaseSandbox.write), _of_workspace(BaseSandbox.awrite)
    edit, aedit = _of_workspace(BaseSandbox.edit), _of_workspace(BaseSandbox.aedit)
    delete = _of_workspace(BaseSandbox.delete)
    grep, agrep = _of_workspace(BaseSandbox.grep), _of_workspace(BaseSandbox.agrep)
    glob, aglob = _of_workspace(BaseSandbox.glob), _of_workspace(BaseSandbox.aglob)

    def inside(self, path: str) -> str:
        """Return the absolute path, as commands see it, of a path of the workspace."""
        top = self.root.rstrip("/")
        normal = "/" + posixpath.normpath(f"/{path}").lstrip("/")
        return normal if normal == self.root or normal.startswith(f"{top}/") else f"{top}{normal}".rstrip("/") or "/"

    def _edit_via_upload(self, file_path: str, old_string: str, new_string: str, replace_all: bool) -> EditResult:
        """Edit with texts that are too long for a command line, through the mount."""
        try:
            done = edit_file(self._files, self._below(file_path), old_string, new_string, replace_all=replace_all)
        except ConnectionError:
            raise
        except (OSError, ValueError) as error:
            return EditResult(error=f"Error editing file '{file_path}': {error}")
        return EditResult(path=file_path, occurrences=done.replacements)

    async def _aedit_via_upload(self, *args: Any, **kwargs: Any) -> EditResult:
        return await finish(lambda: self._edit_via_upload(*args, **kwargs))

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files, creating missing directories.  Readers see either the old content or the new one."""
        return [FileUploadResponse(path, _error_of(partial(self._write, path, content))[1]) for path, content in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [FileDownloadResponse(path, *_error_of(partial(self._read, path))) for path in paths]

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """As `upload_files`.  If it is cancelled, it completes first, so that nothing is written after a restore."""
        return await finish(lambda: self.upload_files(files))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return await abandon(lambda: self.download_files(paths))

    def _write(self, path: str, content: bytes) -> None:
        self._files.write_bytes(self._below(path), content)

    def _read(self, path: str) -> bytes:
        with self._files.open_read(self._below(path)) as reader:
            return reader.read()

    def _below(self, path: str) -> str:
        """Return `path` relative to the workspace.  ValueError unless it is absolute; PermissionError outside."""
        if not posixpath.isabs(path):
            raise ValueError(f"a path must be absolute: {path!r}")
        name = posixpath.relpath(posixpath.normpath(path), self.root)
        if name == ".." or name.startswith("../"):
            raise PermissionError(errno.EACCES, f"the path is outside the workspace {self.root}", path)
        return name


def _error_of(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of `call`, or the code of its error.  ConnectionError if the daemon is gone."""
    try:
        return call(), None
    except ConnectionError:
        raise
    except (OSError, ValueError) as error:
        found = (code for kind, code in _ERRORS.items() if isinstance(error, kind))
        return None, next(found, os.strerror(error.errno or errno.EIO) if isinstance(error, OSError) else str(error))


def _cannot_run(error: OSError) -> ExecuteResponse:
    """Report a command that cannot be started, such as a line that is too long.  ConnectionError is raised."""
    if isinstance(error, ConnectionError):
        raise error
    return ExecuteResponse(f"Error: the command cannot be run: {error.strerror or error}", _CANNOT_RUN)
