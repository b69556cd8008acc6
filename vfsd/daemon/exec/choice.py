"""choose_place: where a workspace's commands run, by its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfsd.daemon.exec.host import HostCommandRunner
from vfsd.machine.optional_dependencies import lacking

if TYPE_CHECKING:
    from protocol.backends.container.opening import ContainerWorkspace
    from vfsd.daemon.exec.place import CommandRunner
    from vfsd.wire.options import MountOptions

__all__ = ["choose_place"]


def choose_place(options: MountOptions, container: ContainerWorkspace | None) -> CommandRunner | None:
    """On this host, in the workspace's `container`, or in a sandbox; None where there is nothing that may.

    OSError where a package is missing.
    """
    if options.exec_on_host:
        return HostCommandRunner(options.mountpoint, {"VFSD_WORKSPACE": options.name})
    # Here, not above: Podman's client takes longer to import than all else together.
    if container is not None:
        from protocol.backends.container.exec.executor import ContainerPlace  # noqa: PLC0415

        target = container.target
        return ContainerPlace(target.container, target.workdir, owned=options.backend.startswith("image:"))
    if options.sandbox is not None:
        try:
            from vfsd.daemon.exec.sandbox import Sandbox  # noqa: PLC0415
        except ImportError as error:
            raise lacking("the sandbox", error) from None
        return Sandbox(options)
    return None
