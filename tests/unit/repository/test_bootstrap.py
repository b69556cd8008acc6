"""scripts/bootstrap: what it checks before it installs anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.support.rights import need_root

REPOSITORY = Path(__file__).parents[3]


def test_a_machine_without_dev_fuse_is_told_before_anything_is_installed(tmp_path: Path) -> None:
    need_root()
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "bootstrap", tmp_path / "scripts")
    # modprobe succeeds and loads nothing, as in a container; apt-get and pip would say that they were called.
    (tmp_path / "bin").mkdir()
    for name, line in {"modprobe": "true", "apt-get": "echo CALLED >&2; false"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    hidden = 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", hidden, "sh", "scripts/bootstrap", "fuse"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("bootstrap: /dev/fuse is missing")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()
