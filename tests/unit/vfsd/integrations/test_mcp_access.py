"""Who may use `vfsd mcp --http`, and wrong uses of the command; without the SDK."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner

import vfsd
from vfsd.cli.main import cli
from vfsd.integrations.mcp.access import Address, TokenRequired, new_token, parse_address, read_token


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0", Address("127.0.0.1", 0)),
        ("8765", Address("127.0.0.1", 8765)),
        ("localhost:80", Address("127.0.0.1", 80)),
        ("127.0.0.2:1", Address("127.0.0.2", 1)),
        ("[::1]:9", Address("::1", 9)),
    ],
)
def test_loopback_addresses_are_accepted(text: str, address: Address) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["0.0.0.0:1", ":1", "[::]:1", "192.0.2.1:80", "example.com:80", "x", "", "-1", "65536", "1:x", "٣"]
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a port|not a loopback address"):
        parse_address(text)


def test_a_url_has_brackets_around_an_ipv6_address() -> None:
    assert Address("::1", 9).url == "http://[::1]:9/mcp"


def test_tokens_differ_and_are_long() -> None:
    assert new_token() != new_token()
    assert len(new_token()) >= 32


def test_a_token_is_one_word_of_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("0123456789abcdef\n")
    assert read_token(str(file)) == "0123456789abcdef"
    for wrong in ("", "short", "two words of some length", "é" * 20, "x" * 5000):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="has no token"):
            read_token(str(file))
    file.chmod(0o640)
    with pytest.raises(PermissionError, match="chmod 600"):
        read_token(str(file))


def answer(headers: list[tuple[bytes, bytes]], kind: str = "http") -> int:
    """The status of the answer to a request; 200 if the inner application got it."""
    sent: list[MutableMapping[str, Any]] = []

    async def inner(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("the body of a request without the token was read")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    anyio.run(TokenRequired(inner, "secret-token"), {"type": kind, "headers": headers}, receive, send)
    return int(sent[0]["status"])


def test_a_request_needs_the_token() -> None:
    assert answer([(b"authorization", b"Bearer secret-token")]) == 200
    assert answer([(b"Authorization", b"bearer secret-token")]) == 200
    wrong = [b"Bearer secret-toke", b"Bearer ", b"Basic secret-token", b"secret-token", b"", b"Bearer \xff\x00"]
    assert [answer([(b"authorization", value)]) for value in wrong] == [401] * len(wrong)
    assert answer([]) == 401
    assert answer([(b"authorization", b"Bearer secret-token"), (b"authorization", b"Bearer x")]) == 401


# -- the command ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--token-file", "x"], "--token-file needs --http"),
        (["--json"], "--json needs --http, because standard output carries the protocol"),
        (["--http", "0.0.0.0:1"], "'0.0.0.0' is not a loopback address"),
        (["--http", "x"], "not a port: 'x'"),
    ],
)
def test_wrong_use_is_one_line(words: list[str], reason: str) -> None:
    result = CliRunner().invoke(cli, ["mcp", *words])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"vfsd: error: {reason}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--http", "0"]])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mcp", "uvicorn", "mcp_types"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("server", "http"):
        monkeypatch.delitem(sys.modules, f"vfsd.integrations.mcp.{name}", raising=False)
    result = CliRunner().invoke(cli, ["mcp", *words])
    assert result.exit_code == 1
    assert "`vfsd mcp` lacks a package" in result.stderr
    assert f"{Path(vfsd.__file__).parents[1]}[mcp]" in result.stderr
    assert result.stdout == ""
