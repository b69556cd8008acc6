"""Draw docs/session.svg, the terminal in the README, from what `scripts/demo` prints: python scripts/session_picture.py

Needs `vfsd` in PATH.  Run it again when the output of the commands has changed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

REPOSITORY = Path(__file__).parents[1]
PICTURE = REPOSITORY / "docs" / "session.svg"
COLUMNS = 92
# The commands of the demo that the picture shows, and the most lines of output of each.
SHOWN = {"vfsd run": 12, "vfsd restore": 2, "vfsd apply -w run-project tools": 1, "vfsd unmount": 0}


def shown(output: str) -> list[str]:
    """The lines of the picture: commands that `SHOWN` names, with their output; the demo's own words are left out."""
    temporary = re.search(r"^\$ cd (\S+)/project$", output, re.MULTILINE)
    assert temporary is not None, output
    lines: list[str] = []
    left = 0
    for line in output.replace(f"{temporary[1]}/agent", "agent").replace(f"{temporary[1]}/", "~/").splitlines():
        if line.startswith("$ "):
            left = next((most + 1 for begin, most in SHOWN.items() if line.startswith(f"$ {begin}")), 0)
            if left and lines:
                lines.append("")
        if left and line and not line.startswith(("# ", "  ok: ")):
            lines.append(line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…")
            left -= 1
    return lines


def main() -> None:
    """Run the demo, and write the picture."""
    demo = subprocess.run([REPOSITORY / "scripts" / "demo"], capture_output=True, text=True, check=False)
    if demo.returncode:
        sys.exit(demo.stdout + demo.stderr)
    console = Console(record=True, width=COLUMNS, file=Path("/dev/null").open("w"))  # noqa: SIM115
    for line in shown(demo.stdout):
        text = Text(line, style="bold" if line.startswith("$ ") else "")
        if " | " in line:
            text.highlight_regex(r"\+(?=[+-]*$)", "green")
            text.highlight_regex(r"(?<=[ +-])-(?=-*$)", "red")
        console.print(text)
    # Without the font of a web host: browsers take the reader's own.
    picture = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="vfsd"), flags=re.DOTALL)
    PICTURE.write_text(picture)


if __name__ == "__main__":
    main()
