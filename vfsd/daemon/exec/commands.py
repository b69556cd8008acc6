"""The commands of one workspace, each followed by a snapshot if the workspace was mounted with that option.

Threading: the serving loop.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import shlex
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import trio

from protocol.errors import SnapshotExistsError
from vfsd.daemon.attached import needs_mount
from vfsd.daemon.snapshots.base import UNOBSERVED, SnapshotService, free_name
from vfsd.machine.interpreter import missing_package
from vfsd.machine.logs import log_failure
from vfsd.machine.runtime import is_own_place
from vfsd.operations.fs import ExecEnded

if TYPE_CHECKING:
    from protocol.backends.container.workspace import ContainerWorkspace
    from protocol.execution.executor import Command
    from protocol.execution.runner import CommandLimits, CommandRunner, Feed, OnOutput
    from vfsd.daemon.exec.sandbox import Sandbox
    from vfsd.wire.options import MountOptions

_ENDED_POLL_S: Final = 0.01
_SNAPSHOT_PREFIX: Final = "exec-"
_TAG_CHARACTERS: Final = 200  # at most 800 bytes of the TAG_MAX_BYTES that a volume takes
_logger = logging.getLogger(__name__)


def choose_commands(
    options: MountOptions,
    container: ContainerWorkspace | None,
    snapshots: SnapshotService | None,
    open_root: Callable[[], int],
) -> Commands:
    """Choose where commands run: on this host, in the workspace's `container`, in a sandbox, or nowhere.

    `open_root` opens the root of the mount.

    OSError if a package is missing.
    """
    name = options.workspace.name
    is_attached = options.is_attached
    run_with = functools.partial(
        Commands,
        name,
        is_attached=is_attached,
        is_system=options.workspace.backend.argument == "/" and is_own_place(options.workspace.mountpoint),
        snapshots=snapshots if options.commands.snapshot_each else None,
    )
    if options.commands.exec_on_host:
        # Start-up: most workspaces run no commands.
        from protocol.execution.host import HostCommandRunner  # noqa: PLC0415

        return run_with(runner=HostCommandRunner(options.workspace.mountpoint, {"VFSD_WORKSPACE": name}, open_root))
    # Imported here because Podman's client takes longer to import than everything else together.
    if container is not None:
        from protocol.backends.container.exec.runner import ContainerCommandRunner  # noqa: PLC0415

        target = container.target
        is_owned = options.workspace.backend.kind == "image"
        runner = ContainerCommandRunner(target.container, target.workdir, owned=is_owned)
        return run_with(runner=runner, end_abandoned=runner.end_abandoned)
    if options.commands.sandbox is not None:
        try:
            from vfsd.daemon.exec.sandbox import Sandbox  # noqa: PLC0415
        except ImportError as error:
            raise missing_package("the sandbox", error) from None
        return run_with(sandbox=Sandbox(options.workspace, options.commands.sandbox.argument, options.container))
    return run_with()


class Commands:
    """Runs a workspace's commands with `runner`, or else in `sandbox`.

    If `snapshots` are given, one is taken after each command: exec-1, exec-2, ...
    `end_abandoned` ends what the commands of dead daemons left where `runner` runs them.
    """

    def __init__(
        self,
        workspace: str,
        *,
        is_attached: bool = False,
        is_system: bool = False,
        runner: CommandRunner | None = None,
        sandbox: Sandbox | None = None,
        snapshots: SnapshotService | None = None,
        end_abandoned: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._workspace = workspace
        self._is_attached = is_attached
        self._is_system = is_system  # of `vfsd run --system`
        self._runner = runner or sandbox
        self._sandbox = sandbox
        self._snapshots = snapshots
        self._numbers: itertools.count[int] | None = None  # of the next snapshots
        self._end_abandoned = end_abandoned
        self._running: set[trio.CancelScope] = set()

    async def run(self, command: Command, limits: CommandLimits, *, on_output: OnOutput, feed: Feed) -> ExecEnded:
        """Run a command until it ends; see `protocol.execution.runner.CommandRun`.

        Cancelling kills it.  OSError if it cannot be started; OSError (ECANCELED) if `end` ended it.
        """
        with trio.CancelScope() as scope:
            self._running.add(scope)
            try:
                return await self._run(command, limits, on_output, feed)
            finally:
                self._running.discard(scope)
        raise OSError(errno.ECANCELED, "the workspace was unmounted, which ended the command")

    async def _run(self, command: Command, limits: CommandLimits, on_output: OnOutput, feed: Feed) -> ExecEnded:
        if self._runner is None:
            raise self._unsupported()
        from protocol.execution.runner import CommandRun  # noqa: PLC0415 (start-up: the first command has time)

        run = CommandRun(command, limits, on_output=on_output, feed=feed)
        try:
            exit_status = await run.execute(self._runner)
        except BaseException:
            if run.has_run:
                await self._snapshot(command)  # the command may have changed files
            raise
        snapshot, snapshot_error = await self._snapshot(command)
        return ExecEnded(exit_status, run.timed_out, run.truncated, snapshot, snapshot_error)

    @property
    def where(self) -> str | None:
        """The place where commands run, in words; None if the workspace cannot run commands."""
        return None if self._runner is None else self._runner.where

    @property
    def has_sandbox(self) -> bool:
        """Whether `leave` removes a sandbox."""
        return self._sandbox is not None

    async def attend(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Create the sandbox, if there is one, and keep it while the mount is served.  OSError if that fails.

        Without one, end what commands of dead daemons left.
        """
        if self._sandbox is not None:
            await self._sandbox.attend(task_status=task_status)
            return
        task_status.started()
        if self._end_abandoned is not None:
            await self._end_abandoned()

    def check_idle(self) -> None:
        """Raise OSError (EBUSY) while commands keep the mount busy in a way that the kernel does not see."""
        if self._sandbox is not None:
            self._sandbox.check_idle()

    async def end(self) -> None:
        """End the commands that run, after the unmount; return when they have ended."""
        for scope in self._running:
            scope.cancel()
        while self._running:
            await trio.sleep(_ENDED_POLL_S)

    async def leave(self) -> None:
        """Remove the sandbox, for an unmount."""
        if self._sandbox is not None:
            await self._sandbox.leave()

    async def _snapshot(self, command: Command) -> tuple[str | None, str | None]:
        """Take a snapshot; return its name, or else the reason of the failure.  Raises nothing: the command has run."""
        if self._snapshots is None:
            return None, None
        with trio.CancelScope(shield=True):
            try:
                return await self._take(self._snapshots, _tag(command)), None
            except Exception as error:  # noqa: BLE001 -- log_failure logs the traceback of all but OSErrors
                log_failure(_logger, "snapshot after a command", error, level=logging.WARNING)
                return None, getattr(error, "strerror", None) or str(error) or type(error).__name__
        return None, None

    async def _take(self, snapshots: SnapshotService, tag: str) -> str:
        if self._numbers is None:
            first = free_name(_SNAPSHOT_PREFIX, await snapshots.infos())
            self._numbers = itertools.count(int(first.removeprefix(_SNAPSHOT_PREFIX)))
        while True:
            try:
                name = f"{_SNAPSHOT_PREFIX}{next(self._numbers)}"
                return (await snapshots.take(name, tag, UNOBSERVED, kind="automatic")).name
            except SnapshotExistsError:
                pass  # a client used that name

    def _unsupported(self) -> OSError:
        if self._is_attached:
            return needs_mount("a command of `vfsd exec`", "run the command in the directory itself")
        if self._is_system:
            advice = f"`vfsd run --system --name {self._workspace} -- COMMAND` runs one in it"
            return OSError(errno.EOPNOTSUPP, f"commands would run outside of the overlay of the machine: {advice}")
        return OSError(
            errno.EOPNOTSUPP,
            f"workspace {self._workspace!r} cannot run commands: its backend has nothing to run them in. Mount it with "
            "--sandbox image:REF to run them in a container that sees its files, or with --on-host to run them on this "
            "host with your rights",
        )


def _tag(command: Command) -> str:
    """The command in one line that JSON can carry."""
    line = shlex.join(command.argv).encode("utf-8", "backslashreplace").decode()
    return " ".join(line.split())[:_TAG_CHARACTERS]
