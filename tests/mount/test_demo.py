"""`make demo`: the tour checks itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.extended
@pytest.mark.slow
def test_the_demo_passes_its_checks_and_leaves_nothing(tmp_path: Path) -> None:
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "TMPDIR": str(tmp_path)}
    done = subprocess.run([REPOSITORY / "scripts/demo"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "demo: all checks passed" in done.stdout
    assert list(tmp_path.iterdir()) == []
