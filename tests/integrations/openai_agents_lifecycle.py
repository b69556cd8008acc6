"""Run the OpenAI Agents SDK's own test of a sandbox's life with our client in the place of the SDK's.

A program, because the SDK's tests are a package named `tests`, too: `python openai_agents_lifecycle.py SOURCE DIR`.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import set_tracing_disabled

from vfsd.integrations.openai_agents import VfsdSandboxClient, VfsdSandboxClientOptions, VfsdSandboxSession

PACKAGE = "tests.sandbox.integration_tests"
TEST = "test_runner_preserves_unix_local_lifecycle_state_across_pause_and_resume"


class Swapped(VfsdSandboxClient):
    backend_id = "unix_local"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.supports_default_options = True

    async def create(self, **arguments: Any) -> Any:
        return await super().create(**{**arguments, "options": VfsdSandboxClientOptions(exec_on_host=True)})


def main(source: str, directory: str) -> None:
    sys.path.insert(0, source)
    set_tracing_disabled(True)
    helpers = importlib.import_module(f"{PACKAGE}._helpers")
    module = importlib.import_module(f"{PACKAGE}.test_runner_pause_resume")
    prepare = VfsdSandboxSession._prepare_exec_command

    def without_profile(self: VfsdSandboxSession, *command: Any, **options: Any) -> list[str]:
        # Debian's /etc/profile replaces root's PATH, and with it the programs that the test puts there.
        return ["-c" if word == "-lc" else word for word in prepare(self, *command, **options)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "UnixLocalSandboxClient", Swapped)
        patch.setattr(VfsdSandboxSession, "_prepare_exec_command", without_profile)
        # The daemon unmounts with the real one.
        tools = [name for name in helpers.MOCK_TOOL_NAMES if name != "fusermount3"]
        patch.setattr(helpers, "MOCK_TOOL_NAMES", tuple(tools))
        asyncio.run(getattr(module, TEST)(patch, Path(directory)))
    print("passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
