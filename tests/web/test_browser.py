"""The page in a real Chromium: Debian's package, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.web.conftest import Site
from tests.web.test_pages import HOSTILE, PNG
from vfsd.client.workspace import Workspace
from vfsd.web import pages

PROGRAMS = ("chromium-headless-shell", "chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("there is no Chromium: install chromium-headless-shell")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def context(browser: Browser, site: Site) -> Iterator[BrowserContext]:
    opened = browser.new_context()
    yield opened
    opened.close()


@pytest.fixture
def page(context: BrowserContext, site: Site) -> Iterator[Page]:
    """A page that came in by the URL with the token.  No script failed, no policy was violated, no dialog opened."""
    problems: list[str] = []
    opened = context.new_page()
    opened.set_default_timeout(20_000)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    opened.on("console", lambda line: problems.append(line.text) if "Content Security" in line.text else None)
    opened.goto(site.entrance)
    opened.wait_for_url(f"{site.url}/")
    yield opened
    assert problems == []


def overflow(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def test_from_the_timeline_to_a_diff_and_a_restore_that_is_undone(page: Page, root: Path, story: None) -> None:
    page.click("text=demo")
    assert page.locator(".timeline li").count() == 3
    page.click(".timeline li:nth-child(2) a[title='What changed']")
    page.click("text=a.txt")
    changed = page.locator("tr.changed")
    assert changed.locator(".old").inner_text() == "second"
    assert changed.locator(".new").inner_text() == "SECOND"
    colours = [
        changed.locator(side).evaluate("each => getComputedStyle(each).backgroundColor") for side in (".old", ".new")
    ]
    assert len(set(colours)) == 2
    page.click("text=Restore this path from one")
    assert "a.txt" in page.locator(".changes").inner_text()
    assert "SECOND" in (root / "a.txt").read_text()
    page.click("button:text('Restore')")
    assert "Restored a.txt from one" in page.inner_text("h1")
    assert "SECOND" not in (root / "a.txt").read_text()
    page.locator("button:text('Undo')").evaluate("each => { each.click(); each.click(); }")  # a form is sent once
    page.wait_for_selector("h1:has-text('Undid')")
    assert "SECOND" in (root / "a.txt").read_text()
    page.click("button:text('Redo')")
    assert "Redid" in page.inner_text("h1")
    assert "SECOND" not in (root / "a.txt").read_text()


def test_an_open_page_follows_the_workspace(page: Page, site: Site, root: Path, workspace: Workspace) -> None:
    page.goto(f"{site.url}/w/demo/tree")
    page.wait_for_selector("#status:text-is('live')")
    (root / "made by a program").touch()
    page.wait_for_selector("text=made by a program")
    page.goto(f"{site.url}/w/demo/")
    page.wait_for_selector("#status:text-is('live')")
    page.fill("input[name=name]", "half a na")
    workspace.snapshot("meanwhile")
    page.wait_for_timeout(1500)
    assert page.input_value("input[name=name]") == "half a na"  # the page does not take away what the user types
    page.fill("input[name=name]", "")
    page.evaluate("document.activeElement.blur()")
    page.wait_for_selector("text=meanwhile")


def test_what_takes_longer_appears_later(
    page: Page, site: Site, root: Path, story: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SOON_S", 0.0)
    page.goto(f"{site.url}/w/demo/tree?snapshot=two")
    page.wait_for_selector("text=gone")  # removed in two, so only the comparison knows it
    assert page.locator("[data-wait]").count() == 0
    page.goto(f"{site.url}/w/demo/tree")
    page.wait_for_selector("#status:text-is('live')")
    page.wait_for_selector("table.files")
    (root / "made later").touch()
    page.wait_for_selector("tr:has-text('made later') .marks:has-text('A')")
    assert page.locator("[data-wait]").count() == 0


def test_a_workspace_that_ends_under_an_open_page_says_so(page: Page, site: Site, workdir: Path) -> None:
    with Workspace.mount(workdir / "e", name="ending"):
        page.goto(f"{site.url}/w/ending/")
        page.wait_for_selector("#status:text-is('live')")
    page.wait_for_selector("text=That did not work")
    assert "no workspace ending" in page.inner_text("[role=alert]")


def test_hostile_names_and_contents_do_nothing(page: Page, site: Site, root: Path, workspace: Workspace) -> None:
    for name in HOSTILE:
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_text("<script>alert(1)</script>")
    (root / "attack.html").write_text("<script>alert(1)</script>")
    (root / "attack.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>")
    workspace.snapshot("all")
    for path in ("/w/demo/tree", "/w/demo/tree?snapshot=all", "/w/demo/restore?snapshot=all", "/w/demo/changes"):
        page.goto(site.url + path)
    page.goto(f"{site.url}/w/demo/tree")
    links = page.locator("a.row")
    assert links.count() == len(HOSTILE) + 2
    targets = [links.nth(at).get_attribute("href") for at in range(links.count())]
    for target in targets:
        page.goto(f"{site.url}{target}")
        assert "alert(1)" in page.inner_text("pre.content") or "svg" in page.inner_text("pre.content")
        with page.expect_download() as download:
            page.click("text=Download")
        assert "alert(1)" in download.value.path().read_text()
    assert page.evaluate("[...document.scripts].every(each => new URL(each.src).pathname.startsWith('/static/'))")


def test_pictures_are_shown(page: Page, site: Site, root: Path, workspace: Workspace) -> None:
    picture = page.screenshot()
    (root / "p.png").write_bytes(picture)
    workspace.snapshot("one")
    page.emulate_media(color_scheme="dark")
    (root / "p.png").write_bytes(page.screenshot())
    page.goto(f"{site.url}/w/demo/compare?a=one&path=p.png")
    page.evaluate("Promise.all([...document.images].map(each => each.decode()))")
    assert page.evaluate("[...document.images].map(each => each.naturalWidth > 100)") == [True, True]
    assert picture.startswith(PNG[:8])


def test_reading_and_restoring_work_without_scripts(browser: Browser, site: Site, root: Path, story: None) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(site.entrance)
    page.wait_for_url(f"{site.url}/")
    page.click("text=demo")
    page.click(".timeline li:nth-child(3) >> text=one")
    page.click("text=gone")
    assert page.inner_text("pre.content") == "x"
    page.click("text=Restore")
    page.click("button:text('Restore')")
    assert (root / "gone").exists()
    context.close()


def test_the_dark_scheme_is_dark_and_text_has_contrast(page: Page, site: Site, story: None) -> None:
    page.goto(f"{site.url}/w/demo/")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    text = page.evaluate("getComputedStyle(document.body).color")
    assert (light, _brightness(dark) < 40, _brightness(text) > 180) == ("rgb(255, 255, 255)", True, True)


def _brightness(colour: str) -> float:
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 3


def test_keys_move_open_and_go_up(page: Page, site: Site, story: None) -> None:
    page.goto(f"{site.url}/w/demo/tree?snapshot=two")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == "src/"
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.textContent") == "a.txt"
    page.keyboard.press("Enter")
    page.wait_for_selector("pre.content")
    page.wait_for_load_state()  # keys work once the page's script has run
    page.keyboard.press("u")
    page.wait_for_selector("table.files")
    page.wait_for_load_state()
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    page.keyboard.press("r")
    page.wait_for_url("**/restore**")
    page.wait_for_load_state()
    page.keyboard.press("t")
    page.wait_for_selector(".timeline")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches(':focus-visible')")


@pytest.fixture(params=["with scripts", "without scripts"])
def keyboard(request: pytest.FixtureRequest, browser: Browser, site: Site) -> Iterator[Page]:
    """A page that is used by keyboard only."""
    context = browser.new_context(java_script_enabled=request.param == "with scripts")
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.goto(site.entrance)
    page.wait_for_url(f"{site.url}/")
    yield page
    context.close()


def press(page: Page, selector: str, key: str = "Enter") -> None:
    """Go to an element with the Tab key, and press `key` there."""
    wanted = page.locator(selector)
    wanted.wait_for()
    for _ in range(60):
        page.keyboard.press("Tab")
        if wanted.evaluate("each => each === document.activeElement"):
            page.keyboard.press(key)
            return
    raise AssertionError(f"the Tab key does not lead to {selector}")


def heading(page: Page, text: str) -> None:
    page.wait_for_selector(f"h1:has-text('{text}')")


@pytest.mark.extended
def test_a_fork_is_adopted_by_keyboard_and_that_is_undone(
    keyboard: Page, site: Site, workdir: Path, root: Path, story: None
) -> None:
    page = keyboard
    site.post("/w/demo/fork", mountpoint=str(workdir / "f"), name="try")
    with Workspace.attach("try") as fork:
        try:
            (workdir / "f" / "of-fork").touch()
            (root / "own").write_text("only here")
            for ticks in (False, True):
                page.goto(f"{site.url}/w/demo/")
                press(page, "button:text-is('Adopt…')")
                heading(page, "Make demo equal to try?")
                assert "own" in page.inner_text("ul.problem")
                if ticks:
                    press(page, "input[name=force]", "Space")
                press(page, "button:text-is('Adopt')")
                heading(page, "Adopted try: " if ticks else "Nothing was changed: 1 conflict with try")
                assert (root / "of-fork").exists() == ticks
                assert (root / "own").exists() != ticks
            press(page, "button:text-is('Undo')")
            heading(page, "Undid")
            assert (root / "own").read_text() == "only here"
        finally:
            fork.unmount()


@pytest.mark.extended
def test_changes_of_an_overlay_are_applied_and_discarded_by_keyboard(keyboard: Page, site: Site, workdir: Path) -> None:
    page = keyboard
    lower, top = workdir / "lower", workdir / "o"
    lower.mkdir()
    for name in ("theirs", "mine"):
        (lower / name).write_text("before")
    with Workspace.mount(top, f"overlay:{lower}", name="over"):  # its log warns of "theirs"
        for name in ("theirs", "mine"):
            (top / name).write_text("changed here")
        (lower / "theirs").write_text("changed there meanwhile")
        for ticks in (False, True):
            page.goto(f"{site.url}/w/over/")
            press(page, "a:text-is('Apply…')")
            heading(page, "Write the changes to")
            assert "theirs" in page.inner_text("ul.problem")
            if ticks:
                press(page, "input[name=force]", "Space")
            press(page, "button:text-is('Apply')")
            heading(page, "Applied to" if ticks else "Nothing was written to")
            assert ((lower / "mine").read_text() == "changed here") == ticks
        assert (lower / "theirs").read_text() == "changed here"

        (top / "mine").write_text("again")
        page.goto(f"{site.url}/w/over/")
        press(page, "a:text-is('Discard…')")
        heading(page, "Discard all changes?")
        press(page, "a:text-is('Cancel')")
        page.wait_for_selector(".timeline")
        assert (top / "mine").read_text() == "again"
        press(page, "a:text-is('Discard…')")
        press(page, "button:text-is('Discard')")
        heading(page, "Discarded: 1 modified")
        assert (top / "mine").read_text() == "changed here"
        press(page, "button:text-is('Undo')")
        heading(page, "Undid")
        assert (top / "mine").read_text() == "again"


@pytest.mark.usefixtures("story")
def test_a_phone_needs_no_scrolling_sideways(page: Page, site: Site, root: Path, workspace: Workspace) -> None:
    long, state = "n" * 255, "s" * 128
    (root / long).write_text("long " * 500 + "x" * 5000)
    workspace.snapshot(state)
    (root / long).write_text("other")
    page.set_viewport_size({"width": 360, "height": 640})
    for path in (
        "", "w/demo/", "w/demo/tree", f"w/demo/file?path={long}", "w/demo/changes", "w/demo/restore?snapshot=one",
        f"w/demo/compare?a={state}&path={long}", "w/demo/compare?a=one&b=two&path=a.txt", "w/demo/fork", "w/none/",
    ):  # fmt: skip
        page.goto(f"{site.url}/{path}")
        assert overflow(page) <= 0, path
    page.goto(f"{site.url}/w/demo/compare?a=one&b=two&path=a.txt")
    assert page.locator("tr.changed").inner_text().split() == ["2", "second", "2", "SECOND"]


@pytest.mark.extended
def test_many_files(page: Page, site: Site, root: Path, workspace: Workspace, runs_long: bool) -> None:
    """Each page has a bounded number of lines.  With --runs-long: 100,000 files in one directory."""
    workspace.snapshot("empty")
    (root / "flat").mkdir()
    directory = os.open(root / "flat", os.O_RDONLY)
    for number in range(100_000 if runs_long else 3_000):
        os.close(os.open(f"{number:06}", os.O_CREAT | os.O_WRONLY, dir_fd=directory))
    os.close(directory)
    workspace.snapshot("full")
    for path in ("", "tree", "tree?path=flat", "tree?path=flat&snapshot=full", "changes?a=empty&b=full"):
        page.goto(f"{site.url}/w/demo/{path}")
        assert page.locator("main *").count() < 10_000
    page.goto(f"{site.url}/w/demo/tree?path=flat&snapshot=full&after=000499")
    assert page.locator("a.row").first.inner_text() == "000500"
