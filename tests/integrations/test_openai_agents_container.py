"""OpenAI Agents SDK: a session whose commands run in a container."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

pytest.importorskip("agents")

from agents.sandbox import Manifest, SandboxPathGrant
from agents.sandbox.entries import File
from agents.sandbox.errors import ExposedPortUnavailableError

from protocol.backends.container.podman.service import PodmanService
from tests.container.conftest import busybox_image, podman, podman_url  # noqa: F401 fixtures
from vfsd.client.workspace import Workspace
from vfsd.integrations.openai_agents import VfsdSandboxClient, VfsdSandboxClientOptions, VfsdSnapshotSpec


def test_commands_and_files_have_the_same_paths(workdir: Path, podman: PodmanService, busybox_image: str) -> None:  # noqa: F811
    options = VfsdSandboxClientOptions(
        path=str(workdir / "m"),
        name=workdir.name,
        sandbox=f"image:{busybox_image}",
        podman_url=podman.address.url,
        allow_other=True,
        exposed_ports=(8000,),
    )

    async def main() -> None:
        client = VfsdSandboxClient()
        manifest = Manifest(entries={"a.txt": File(content=b"a\n")})
        session = await client.create(options=options, manifest=manifest, snapshot=VfsdSnapshotSpec())
        try:
            await session.start()
            assert session.state.manifest.root == "/workspace"
            done = await session.exec("pwd; cat /workspace/a.txt; id -u")
            assert done.stdout == b"/workspace\na\n0\n"
            assert (await session.exec("id -u", user="dev")).stdout == b"1000\n"
            await session.write(Path("/workspace/d/b.txt"), io.BytesIO(b"b\n"))
            await session.exec("chmod 777 d; ln -s /etc/passwd out; ln -s d/b.txt in")
            assert (await session.read(Path("in"))).read() == b"b\n"
            with pytest.raises(Exception, match="failed to read"):
                await session.read(Path("out"))
            await session.write(Path("d/of-dev"), io.BytesIO(b"dev\n"), user="dev")
            assert (await session.exec("stat -c %u d/of-dev; cat d/of-dev")).stdout == b"1000\ndev\n"
            assert (await session.read(Path("d/of-dev"), user="dev")).read() == b"dev\n"
            update = await session.pty_exec_start("tty; id -u", tty=True, user="dev", yield_time_s=20)
            assert (update.output.split()[-1], update.exit_code) == (b"1000", 0)
            with pytest.raises(ExposedPortUnavailableError):
                await session.resolve_exposed_port(8000)
            await session.stop()
            await session.exec("rm -r d")
            resumed = await client.resume(session.state)
            await resumed.start()
            assert (await resumed.exec("cat d/b.txt")).stdout == b"b\n"
        finally:
            await session.shutdown()
            Workspace.attach(workdir.name).unmount(lazy=True)
        granted = Manifest(extra_path_grants=(SandboxPathGrant(path="/tmp"),))
        with pytest.raises(ValueError, match="cannot grant paths"):
            await client.create(options=options, manifest=granted)

    asyncio.run(main())
