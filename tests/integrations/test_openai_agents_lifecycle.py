"""OpenAI Agents SDK: the SDK's own test of a sandbox's life, from its source distribution, with the class swapped in.

It applies a manifest with every kind of entry, runs commands, patches, archives and a terminal, pauses, saves, ends the
sandbox, and resumes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("agents")


def test_the_sdks_own_test_of_a_sandbox_passes(workdir: Path) -> None:
    source = os.environ.get("VFSD_OPENAI_AGENTS_SOURCE")
    if source is None:
        pytest.skip("the SDK's source distribution is missing: make test-integrations fetches it")
    program = Path(__file__).with_name("openai_agents_lifecycle.py")
    done = subprocess.run([sys.executable, program, source, workdir], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr
