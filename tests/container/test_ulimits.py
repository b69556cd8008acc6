"""Containers start where Podman may not set its default limits; here a service that has no others configured."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import pytest

from protocol.backends.container.podman.service import PodmanService
from protocol.backends.container.podman.spec import ContainerSpec
from tests.container.conftest import BUSYBOX, import_image, inside
from tests.container.images import write_busybox_image
from tests.container.service import NoPodmanError, running_service


@pytest.mark.extended
def test_a_container_starts_with_limits_that_podman_may_set(workdir: Path) -> None:
    archive = workdir / "busybox.tar"
    write_busybox_image(archive)
    try:
        with (
            running_service(workdir / "podman", default_ulimits=True) as url,
            contextlib.closing(PodmanService(url)) as podman,
        ):
            import_image(url, archive, BUSYBOX)
            container = podman.create(ContainerSpec(BUSYBOX, name="limited"))
            try:
                container.start()
                limits = [int(word) for word in inside(container, "ulimit -Hn").split()]
            finally:
                container.remove()
            assert podman.labelled({}) == []  # the one that was made first, with other limits, is gone
    except NoPodmanError as error:
        pytest.skip(f"no Podman service can be run here: {error}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert hard == resource.RLIM_INFINITY or 0 < limits[0] <= hard
