r"""Commands that are not valid UTF-8, for Podman's API, which carries JSON strings.

Go's JSON decoder replaces invalid bytes by U+FFFD, so the words of such a command would change.  vfsd sends the words
as octal escapes instead; a shell in the container decodes them (printf(1p), `%b`) and executes the command.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

_NAME: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*")  # environ(7), as shells take it
# Follows the generated `cd`, `set --` and `export`.  Reports a missing program with the runtime's text; see
# `runner._start_error`.
_EXECUTE: Final = r"""
if ! case $1 in */*) [ -e "$1" ] ;; *) command -v "$1" >/dev/null 2>&1 ;; esac; then
  echo "Error: OCI runtime: no such file or directory" >&2
  exit 127
fi
exec "$@"
"""
_ENTER: Final = r"""
cd -- "$_vfsd" 2>/dev/null || { echo "Error: OCI runtime: chdir to it: no such file or directory" >&2; exit 127; }
"""


def is_utf8(*words: str) -> bool:
    """Whether all `words`, as os.fsdecode returns them, are valid UTF-8."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        return False
    return True


def through_shell(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> list[str]:
    """An ASCII command for /bin/sh that runs `argv` with `env` added, in the directory `cwd`.

    OSError (EILSEQ): a variable's name is not one that a shell can set.
    """
    lines = [_assigned(cwd) + _ENTER]
    for name, value in env.items():
        if not _NAME.fullmatch(name):
            raise OSError(
                errno.EILSEQ, "a variable that is not valid UTF-8 needs a name of letters, digits and _", name
            )
        lines.append(f"{_assigned(value)}; export {name}; {name}=$_vfsd")
    lines.append("set --")
    lines += [f'{_assigned(word)}; set -- "$@" "$_vfsd"' for word in argv]
    return ["/bin/sh", "-c", "\n".join([*lines, "unset _vfsd", _EXECUTE])]


def _assigned(word: str) -> str:
    """Shell code that assigns the bytes of `word` to $_vfsd; "x" preserves trailing newlines."""
    escaped = "".join(f"\\0{byte:03o}" for byte in os.fsencode(word))
    return f"_vfsd=$(printf '%b' '{escaped}x'); _vfsd=${{_vfsd%x}}"
