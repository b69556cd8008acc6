"""A model endpoint on loopback that answers as a script says, streamed.

It speaks Anthropic's Messages API, OpenAI's Responses API and Gemini's API.  A script sees each request, and answers
it, in the shape of the first one.

Only requests that offer tools are answered by the script; an agent's other requests (titles, summaries) get one word.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Request = dict[str, Any]
Block = dict[str, Any]
Script = Callable[[Request], list[Block]]


def text(words: str) -> Block:
    return {"type": "text", "text": words}


def tool_use(identifier: str, name: str, **arguments: Any) -> Block:
    return {"type": "tool_use", "id": identifier, "name": name, "input": arguments}


def results(request: Request) -> list[str]:
    """The ids of the tool calls whose results the request contains, oldest first."""
    blocks = [block for each in request["messages"] if isinstance(each["content"], list) for block in each["content"]]
    return [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]


class ScriptedModel:
    """A context manager.  Set `script`; it is called for each request, in the thread that answers it."""

    def __init__(self) -> None:
        self.script: Script = lambda _: [text("done")]
        self.requests: list[Request] = []
        self.failures: list[str] = []
        model = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 its name in the base class
                pass

            def do_HEAD(self) -> None:
                self._send(200, b"", "text/plain")

            def do_GET(self) -> None:
                self._send(404, b"{}", "application/json")

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if "count_tokens" in self.path:
                    self._send(200, b'{"input_tokens": 10}', "application/json")
                    return
                for part, read, events in _APIS:
                    if part in self.path:
                        self._answer(read(request), events)
                        return
                self._send(404, b"{}", "application/json")

            def _answer(self, request: Request, events: Callable[[Block, list[Block]], Iterator[bytes]]) -> None:
                try:
                    blocks = model.script(request) if request.get("tools") else [text("word")]
                    model.requests.append(request)
                except Exception:
                    model.failures.append(traceback.format_exc())
                    self._send(400, b'{"type": "error", "error": {"type": "x", "message": "x"}}', "application/json")
                    return
                message = _message(request, blocks)
                if request.get("stream"):
                    self._send(200, b"".join(events(message, blocks)), "text/event-stream")
                else:
                    self._send(200, json.dumps(message).encode(), "application/json")

            def _send(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _message(request: Request, blocks: list[Block]) -> dict[str, Any]:
    uses_tool = any(block["type"] == "tool_use" for block in blocks)
    return {
        "id": f"msg_{len(request['messages'])}",
        "type": "message",
        "role": "assistant",
        "model": request["model"],
        "content": blocks,
        "stop_reason": "tool_use" if uses_tool else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 10},
    }


def _events(message: dict[str, Any], blocks: list[Block]) -> Iterator[bytes]:
    start = {**message, "content": [], "stop_reason": None}
    yield _event("message_start", message=start)
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            yield _event("content_block_start", index=index, content_block={"type": "text", "text": ""})
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            yield _event("content_block_start", index=index, content_block={**block, "input": {}})
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    end = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield _event("message_delta", delta=end, usage={"output_tokens": 10})
    yield _event("message_stop")


def _event(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **members})}\n\n".encode()


# -- other APIs -------------------------------------------------------------------------------------
def _result(identifier: str) -> Block:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": identifier}]}


def _from_openai(request: Request) -> Request:
    messages: list[Block] = []
    for item in request["input"]:
        if item["type"] in ("function_call_output", "custom_tool_call_output"):
            messages.append(_result(item["call_id"]))
        elif item["type"] == "message":
            messages.append({"role": item["role"], "content": json.dumps(item["content"])})
    return {"model": request["model"], "stream": True, "messages": messages, "tools": request.get("tools")}


def _openai_events(message: Block, blocks: list[Block]) -> Iterator[bytes]:
    yield _event("response.created", response={"id": message["id"]})
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            content = [{"type": "output_text", "text": block["text"]}]
            item = {"type": "message", "role": "assistant", "id": f"{message['id']}_{index}", "content": content}
        else:
            call = {"name": block["name"], "arguments": json.dumps(block["input"])}
            item = {"type": "function_call", "call_id": block["id"], **call}
        yield _event("response.output_item.done", item=item)
    usage = {"input_tokens": 10, "output_tokens": 10, "total_tokens": 20}
    yield _event("response.completed", response={"id": message["id"], "usage": usage})


def _from_gemini(request: Request) -> Request:
    messages = []
    for content in request["contents"]:
        for part in content["parts"]:
            if "functionResponse" in part:
                messages.append(_result(part["functionResponse"].get("id", "")))
            elif "text" in part:
                messages.append({"role": content["role"], "content": part["text"]})
    return {"model": "gemini", "stream": True, "messages": messages, "tools": request.get("tools")}


def _gemini_events(message: Block, blocks: list[Block]) -> Iterator[bytes]:
    parts = [
        {"text": block["text"]}
        if block["type"] == "text"
        else {"functionCall": {"id": block["id"], "name": block["name"], "args": block["input"]}}
        for block in blocks
    ]
    candidate = {"index": 0, "content": {"role": "model", "parts": parts}, "finishReason": "STOP"}
    usage = {"promptTokenCount": 10, "candidatesTokenCount": 10, "totalTokenCount": 20}
    yield f"data: {json.dumps({'candidates': [candidate], 'usageMetadata': usage})}\n\n".encode()


_APIS = (  # a part of the path, how a request is read, how an answer is written
    ("/v1/messages", lambda request: request, _events),
    ("/v1/responses", _from_openai, _openai_events),
    ("enerateContent", _from_gemini, _gemini_events),
)
