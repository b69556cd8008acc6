"""Make the pictures of docs/audit.md from a real server in Chromium: python -m tests.web.screenshots docs"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Playwright, sync_playwright

from tests.web.conftest import Site, serving
from vfsd.client.workspace import Workspace

PROGRAMS = ("chromium-headless-shell", "chromium")
PICTURES = {
    "web-timeline.png": "",
    "web-diff.png": "compare?a=before&b=toolu_01Fx&path=parser.py",
    "web-conflicts.png": "conflicts",
}
BEFORE = """def parse(line):
    name, value = line.split("=")
    return name, value


def load(path):
    with open(path) as file:
        return dict(parse(line) for line in file)
"""
AFTER = BEFORE.replace(
    'name, value = line.split("=")\n    return name, value',
    'name, equals, value = line.strip().partition("=")\n'
    "    if not equals:\n"
    '        raise ValueError(f"no value: {line!r}")\n'
    "    return name, value",
)


def chromium(playwright: Playwright) -> Browser | None:
    """Start Chromium; None if it is not installed."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        return None
    return playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])


@contextmanager
def example(place: Path) -> Iterator[None]:
    """Mount a project at `place`, in which an agent has worked, and two forks of it."""
    with Workspace.mount(place / "project", name="project") as work:
        root = Path(work.path)
        root.joinpath("parser.py").write_text(BEFORE)
        root.joinpath("notes.md").write_text("# Notes\n")
        work.snapshot("before", tag="claude:prompt session=0f3a: lines without a value")
        root.joinpath("parser.py").write_text(AFTER)
        root.joinpath("tests").mkdir()
        root.joinpath("tests/test_parser.py").write_text("def test_nothing(): ...\n")
        work.snapshot("toolu_01Fx", tag="claude:tool session=0f3a id=toolu_01Fx: Edit: parser.py")
        subprocess.run(["rm", "notes.md"], cwd=root, check=True)
        work.snapshot("toolu_02Rm", tag="claude:tool session=0f3a id=toolu_02Rm: Bash: rm notes.md")
        with work.fork(place / "faster", name="faster"), work.fork(place / "typed", name="typed"):
            for name, line in (("faster", "def parse(line: bytes):"), ("typed", "def parse(line: str) -> tuple:")):
                path = place / name / "parser.py"
                path.write_text(path.read_text().replace("def parse(line):", line))
            place.joinpath("typed/tests/test_parser.py").write_text("def test_types(): ...\n")
            yield


def take_pictures(browser: Browser, site: Site, directory: Path) -> None:
    """Write the pictures of the workspace `project` into `directory`."""
    page = browser.new_page(viewport={"width": 760, "height": 560})
    page.goto(site.entrance)
    page.wait_for_url(f"{site.url}/")
    for name, path in PICTURES.items():
        page.goto(f"{site.url}/w/project/{path}")
        page.wait_for_function("!document.querySelector('main [data-wait]')")
        page.screenshot(path=directory / name)
    page.close()


def main(directory: Path) -> None:
    """Write the pictures into `directory`."""
    with tempfile.TemporaryDirectory(prefix="vfsd-pictures-") as place, sync_playwright() as playwright:
        os.environ["VFSD_RUNTIME_DIR"] = f"{place}/run"
        browser = chromium(playwright)
        if browser is None:
            raise SystemExit("there is no Chromium: install chromium-headless-shell")
        with example(Path(place)), serving() as site, browser:
            take_pictures(browser, site, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
