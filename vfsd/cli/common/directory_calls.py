"""The `fs.` methods on a directory of this host, without a daemon: what `vfsd fs --root DIR` calls.

Runs the functions that a daemon runs, and reports their errors in the same words.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from protocol.adapters.host_files import HostFiles
from protocol.errors import os_error
from protocol.execution.host import HostExecutor
from protocol.paths import located
from protocol.tools import ToolContext
from vfsd.client.requests import RemoteCall
from vfsd.daemon.control.calls import Encoded, failure_line, host_text, working_directory
from vfsd.daemon.control.handlers import fs_calls
from vfsd.operations.catalogue import OPERATIONS
from vfsd.operations.fs import FsExecParams, FsExecResult, FsReadParams, FsWriteParams
from vfsd.wire.messages import ControlError, ErrorObject, InvalidParamsError, Response, control_error

_Call = Callable[[Any, ToolContext], Any]


def call(root: str, request: RemoteCall[Any]) -> Any:
    """Answer a request of an `fs.` method on the directory `root`.  ControlError, as from a daemon.

    `request.on_output` receives the output before the answer is returned.  Paths that lead out of `root`, through
    symlinks too, raise PermissionError.
    """
    try:
        params = _checked(request)
        context = fs_calls.directory_context(HostFiles(root))
        if isinstance(params, FsExecParams):
            return _exec(root, params, context)
        answer = _CALLS[request.method](params, context)
    except InvalidParamsError as error:
        raise _control_error(request.method, error) from None
    except ValueError as error:
        raise _control_error(request.method, OSError(errno.EINVAL, str(error))) from None
    except OSError as error:
        raise _control_error(request.method, error) from None
    if isinstance(answer, Encoded):
        return msgspec.json.decode(b"".join(answer), type=OPERATIONS[request.method].result)
    if isinstance(params, FsReadParams):
        content, page = answer
        if request.on_output is not None:
            request.on_output(content)
        return page
    return answer


def _checked(request: RemoteCall[Any]) -> Any:
    """Check the parameters as a daemon does, which decodes them.  InvalidParamsError."""
    try:
        return msgspec.convert(msgspec.to_builtins(request.params), OPERATIONS[request.method].params)
    except msgspec.ValidationError as error:
        raise InvalidParamsError(str(error)) from None


def _write(params: FsWriteParams, context: ToolContext) -> Any:
    return fs_calls.write_file(params, fs_calls.content_of(params), context)


def _exec(root: str, params: FsExecParams, context: ToolContext) -> FsExecResult:
    cwd = working_directory(params.cwd)
    if not context.filesystem.stat(cwd).is_directory:
        with located(cwd):
            raise os_error(errno.ENOTDIR)
    done = HostExecutor(root).run(
        list(map(host_text, params.argv)),
        cwd=cwd,
        env=params.env,
        timeout_s=params.timeout_s,
        output_limit_bytes=params.output_limit_bytes,
        stdin=params.stdin,
    )
    return FsExecResult(done.exit_status, done.stdout, done.stderr, done.timed_out, done.truncated)


_CALLS: Final[Mapping[str, _Call]] = {
    "fs.ls": fs_calls.list_directory,
    "fs.stat": fs_calls.stat_path,
    "fs.read": fs_calls.read_file,
    "fs.write": _write,
    "fs.edit": fs_calls.edit_file,
    "fs.glob": fs_calls.find_files,
    "fs.grep": fs_calls.find_lines,
    "fs.rm": fs_calls.remove,
}


def _control_error(method: str, error: Exception) -> ControlError:
    answered = msgspec.json.decode(failure_line(None, method, error), type=Response).error
    assert isinstance(answered, ErrorObject)
    data = answered.data
    number = getattr(errno, data.errno) if data is not None and data.errno else None
    return control_error(answered.code, answered.message, number)
