"""The run in docs/parallel-agents.md works when it is pasted from top to bottom, and prints what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.fuse

PAGE = Path(__file__).parents[2] / "docs" / "parallel-agents.md"
_BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.extended
def test_the_run_works_pasted_from_top_to_bottom(workdir: Path) -> None:
    blocks = _BLOCK.findall(PAGE.read_text())
    script = "".join(text for kind, text in blocks if kind == "sh")
    environment = {
        **os.environ,
        "HOME": str(workdir),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
    }
    ran = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=workdir,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    for kind, text in blocks:
        assert kind == "sh" or text in ran.stdout
    committed = subprocess.run(
        ["git", "show", "--name-only", "--format="], cwd=workdir / "project", capture_output=True, text=True, check=True
    )
    assert committed.stdout.split() == ["README.md", "perimeter.py", "shapes.py"]
    assert (workdir / "project" / "shapes.py").read_text() == "def area(w, h):\n    return w * h\n"
