"""Measures how soon `vfsd web` paints its pages of a workspace with many files, in a real Chromium.

    python -m bench.web [--files 100000] [--rounds 5]

Prints the median time from the navigation to the browser's first contentful paint (Paint Timing API), and the time that
the server took for the first byte (Navigation Timing API), both in milliseconds.  Needs Playwright and Debian's
chromium-headless-shell.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from vfsd.client.workspace import Workspace

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_PAINT = """() => {
    const paint = performance.getEntriesByName('first-contentful-paint')[0];
    const navigation = performance.getEntriesByType('navigation')[0];
    return paint ? [paint.startTime, navigation.responseStart] : null;
}"""


def fill(root: Path, files: int) -> None:
    """Make two thirds of `files` in directories of 1,000, and the rest in one directory."""
    for number in range(files):
        directory = root / "flat" if number % 3 == 0 else root / f"d{number // 1000:04}"
        directory.mkdir(exist_ok=True)
        (directory / f"{number:06}").touch()


def measured(page: Page, url: str, rounds: int) -> tuple[float, float]:
    """Return the medians of first contentful paint and first byte, in milliseconds."""
    found = []
    for _ in range(rounds):
        page.goto(url)
        page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length > 0")
        found.append(page.evaluate(_PAINT))
    paints, bytes_ = zip(*found, strict=True)
    return statistics.median(paints), statistics.median(bytes_)


def main() -> None:
    """Print a line for each page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        sys.exit("bench.web: there is no Chromium: install chromium-headless-shell")
    name = f"bench-web-{os.getpid()}"
    with tempfile.TemporaryDirectory() as directory, Workspace.mount(f"{directory}/m", name=name) as workspace:
        workspace.snapshot("empty")
        fill(Path(workspace.path), arguments.files)
        workspace.snapshot("full")
        words = [sys.executable, "-m", "vfsd.cli.main", "web", "-w", name]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
            try:
                assert server.stdout is not None
                entrance = re.search(r"http://\S+", server.stdout.readline())
                assert entrance is not None
                site = entrance[0].partition("/?")[0]
                browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
                page = browser.new_page()
                page.goto(entrance[0])
                print(f"{arguments.files:,} files; load {os.getloadavg()[0]:.1f}")
                print(f"{'page':32} {'first paint':>12} {'first byte':>12}   (ms, median of {arguments.rounds})")
                for path in ("", "tree", "tree?path=flat", "tree?path=flat&snapshot=full", "changes?a=empty&b=full"):
                    paint, first_byte = measured(page, f"{site}/w/{name}/{path}", arguments.rounds)
                    print(f"{path or 'timeline':32} {paint:12.0f} {first_byte:12.0f}")
                browser.close()
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
