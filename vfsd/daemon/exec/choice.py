"""choose_runner: the runner of a workspace's commands, by its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.execution.host import HostCommandRunner
from vfsd.machine.optional_dependencies import missing_package

if TYPE_CHECKING:
    from protocol.backends.container.workspace import ContainerWorkspace
    from protocol.execution.runner import CommandRunner
    from vfsd.wire.options import MountOptions

__all__ = ["choose_runner"]


def choose_runner(options: MountOptions, container: ContainerWorkspace | None) -> CommandRunner | None:
    """A runner for this host, the workspace's `container` or a sandbox; None if the workspace cannot run commands.

    OSError if a package is missing.
    """
    if options.commands.exec_on_host:
        return HostCommandRunner(options.workspace.mountpoint, {"VFSD_WORKSPACE": options.workspace.name})
    # Imported here because Podman's client takes longer to import than everything else together.
    if container is not None:
        from protocol.backends.container.exec.runner import ContainerCommandRunner  # noqa: PLC0415

        target = container.target
        return ContainerCommandRunner(target.container, target.workdir, owned=options.workspace.backend.kind == "image")
    if options.commands.sandbox is not None:
        try:
            from vfsd.daemon.exec.sandbox import Sandbox  # noqa: PLC0415
        except ImportError as error:
            raise missing_package("the sandbox", error) from None
        return Sandbox(options.workspace, options.commands.sandbox.argument, options.container)
    return None
