"""weakincentives (WINK) (extra `weakincentives`): `python examples/weakincentives_agent.py PROJECT`.

The calls that a model would make are a script here, so that the example runs without a key.  With a real one:
ClaudeAgentSDKAdapter().evaluate(prompt, session=session), whose agent works in the section's directory.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weakincentives.prompt import HostMount, Prompt, PromptTemplate
from weakincentives.runtime import Session
from weakincentives.runtime.transactions import tool_transaction

from protocol.tools import FileWritten
from vfsd.integrations.weakincentives import VfsdWorkspaceSection, dump_session_tree


@dataclass(frozen=True)
class Turn:
    request: str


def call(section: VfsdWorkspaceSection, name: str, **arguments: Any) -> None:
    """Call a tool of the section, as WINK's adapters do for a model."""
    (tool,) = [tool for tool in section.tools() if tool.name == name]
    print(tool.handler(tool.params_type(**arguments), context=Heartbeat()).render())


class Heartbeat:
    def beat(self) -> None: ...


def main(project: str) -> None:
    session = Session()
    mount = HostMount(host_path=project, mount_path="project", exclude_glob=(".git/*",))
    section = VfsdWorkspaceSection(session=session, mounts=[mount], exec_on_host=True)
    prompt: Prompt[Any] = Prompt(PromptTemplate(ns="demo", key="tidy", sections=[section]))
    try:
        with prompt.resources:
            session[Turn].append(Turn("Tidy up"))
            section.checkpoints.snapshot("turn-1")  # the session's state and all files

            call(section, "write_file", path="project/summary.txt", content="done\n")
            call(section, "shell", command="rm project/notes.txt; echo removed")
            session[Turn].append(Turn("Go on"))
            print([f"{change.change} {change.path}" for change in section.workspace.diff().changes])
            print(session[FileWritten].all())

            section.checkpoints.restore("turn-1")  # both, and what the shell did too
            risky = tool_transaction(session, prompt.resources.context, tag="risky")
            with suppress(UnicodeDecodeError), risky:  # WINK does this for each tool call
                section.filesystem.write("project/notes.txt", "broken")
                b"\xff".decode()  # the tool fails
            print("dumped to", dump_session_tree(session, Path(project).parent, filesystem_section=section))
            notes = section.filesystem.read("project/notes.txt").content
            print(f"notes.txt: {notes}, turns: {len(session[Turn].all())}")
    finally:
        section.cleanup()


if __name__ == "__main__":
    main(sys.argv[1])
