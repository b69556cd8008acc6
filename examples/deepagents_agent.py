"""deepagents (extra `deepagents`): `python examples/deepagents_agent.py /tmp/agent`.

The model is a script here, so that the example runs without a key.  With a real one: create_deep_agent(model="...").
"""

from __future__ import annotations

import sys
from typing import Any

from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage

from vfsd import Workspace
from vfsd.integrations.deepagents import VfsdSandbox


class ScriptedModel(GenericFakeChatModel):
    def bind_tools(self, _tools: Any, **_: Any) -> ScriptedModel:
        return self


def call(name: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": name}])


def main(directory: str) -> None:
    with Workspace.mount(directory, exec_on_host=True) as workspace:
        workspace.filesystem.write("notes.txt", "draft")
        workspace.snapshot("before")
        model = ScriptedModel(
            messages=iter([call("execute", command="rm notes.txt; echo removed; ls"), AIMessage("I tidied up.")])
        )
        agent = create_deep_agent(model=model, backend=VfsdSandbox(workspace))
        answer = agent.invoke({"messages": [("user", "Tidy up")]})
        print([message.content for message in answer["messages"] if isinstance(message, ToolMessage)])
        print([f"{change.change} {change.path}" for change in workspace.diff("before").changes])
        workspace.restore("before")
        print("notes.txt:", workspace.filesystem.read("notes.txt").content)


if __name__ == "__main__":
    main(sys.argv[1])
