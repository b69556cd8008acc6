"""OpenAI Agents SDK: a workspace as the sandbox of `SandboxAgent`, its snapshots, and the editor of `ApplyPatchTool`.

with Workspace.mount("/tmp/agent", "overlay:project", exec_on_host=True) as ws:
    sandbox = SandboxRunConfig(client=VfsdSandboxClient(ws), snapshot=VfsdSnapshotSpec())
    await Runner.run(SandboxAgent(name="coder"), "Fix the tests", run_config=RunConfig(sandbox=sandbox))
"""

from vfsd.integrations.openai_agents.client import VfsdSandboxClient
from vfsd.integrations.openai_agents.files import VfsdEditor
from vfsd.integrations.openai_agents.session import VfsdSandboxSession
from vfsd.integrations.openai_agents.snapshot import (
    VfsdSandboxClientOptions,
    VfsdSandboxSessionState,
    VfsdSnapshot,
    VfsdSnapshotSpec,
)

__all__ = [
    "VfsdEditor",
    "VfsdSandboxClient",
    "VfsdSandboxClientOptions",
    "VfsdSandboxSession",
    "VfsdSandboxSessionState",
    "VfsdSnapshot",
    "VfsdSnapshotSpec",
]
