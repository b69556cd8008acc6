"""Choose where a workspace runs its commands, by its options."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from protocol.execution.host import HostCommandRunner
from vfsd.daemon.exec.commands import Commands, TakeSnapshot
from vfsd.machine.optional_dependencies import missing_package

if TYPE_CHECKING:
    from protocol.backends.container.workspace import ContainerWorkspace
    from vfsd.wire.options import MountOptions

__all__ = ["choose_commands"]


def choose_commands(
    options: MountOptions, container: ContainerWorkspace | None, take_snapshot: TakeSnapshot | None
) -> Commands:
    """Choose where commands run: on this host, in the workspace's `container`, in a sandbox, or nowhere.

    OSError if a package is missing.
    """
    name = options.workspace.name
    run_with = functools.partial(Commands, name, take_snapshot=take_snapshot)
    if options.commands.exec_on_host:
        return run_with(runner=HostCommandRunner(options.workspace.mountpoint, {"VFSD_WORKSPACE": name}))
    # Imported here because Podman's client takes longer to import than everything else together.
    if container is not None:
        from protocol.backends.container.exec.runner import ContainerCommandRunner  # noqa: PLC0415

        target = container.target
        is_owned = options.workspace.backend.kind == "image"
        return run_with(runner=ContainerCommandRunner(target.container, target.workdir, owned=is_owned))
    if options.commands.sandbox is not None:
        try:
            from vfsd.daemon.exec.sandbox import Sandbox  # noqa: PLC0415
        except ImportError as error:
            raise missing_package("the sandbox", error) from None
        return run_with(sandbox=Sandbox(options.workspace, options.commands.sandbox.argument, options.container))
    return run_with()
