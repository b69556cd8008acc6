"""The page in a real Chromium: Debian's package, driven by Playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

from tests.web.conftest import Site
from tests.web.screenshots import PICTURES, chromium, example, take_pictures
from tests.web.test_pages import HOSTILE, PNG
from vfsd.client.workspace import Workspace
from vfsd.web import pages


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = chromium(playwright)
        if launched is None:
            pytest.skip("there is no Chromium: install chromium-headless-shell")
        yield launched
        launched.close()


@pytest.fixture
def context(browser: Browser, site: Site) -> Iterator[BrowserContext]:
    opened = browser.new_context()
    yield opened
    opened.close()


@contextmanager
def without_problems(opened: Page) -> Iterator[Page]:
    """On the page no script fails, the console has no errors and no warnings, and no dialog opens."""
    problems: list[str] = []
    opened.set_default_timeout(20_000)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def note(line: ConsoleMessage) -> None:
        is_status = line.text.startswith("Failed to load resource") and "/w/" in line.location["url"]  # a page with 404
        if line.type in ("error", "warning") and not is_status:
            problems.append(line.text)

    opened.on("console", note)
    yield opened
    assert problems == []


@pytest.fixture
def page(context: BrowserContext, site: Site) -> Iterator[Page]:
    """A page that came in by the URL with the token."""
    with without_problems(context.new_page()) as opened:
        opened.goto(site.entrance)
        opened.wait_for_url(f"{site.url}/")
        yield opened


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


# The texts of the page whose contrast to what is behind them is below 4.5 : 1 (WCAG 2.2, 1.4.3).
FAINT = """() => {
  const numbers = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const light = (colour) => numbers(colour).slice(0, 3).map((each) => each / 255)
    .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (each) => {
    const colour = getComputedStyle(each).backgroundColor;
    return numbers(colour)[3] === 0 && each.parentElement ? behind(each.parentElement) : colour;
  };
  const hasText = (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  return [...document.querySelectorAll("body *")].filter((each) => each.checkVisibility() && hasText(each))
    .filter((each) => {
      const [one, other] = [light(getComputedStyle(each).color), light(behind(each))].sort((a, b) => b - a);
      return (one + 0.05) / (other + 0.05) < 4.5;
    }).map((each) => each.outerHTML);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_the_light_and_the_dark_scheme(
    page: Page, site: Site, story: None, scheme: Literal["light", "dark"]
) -> None:
    page.emulate_media(color_scheme=scheme)
    for path in ("", "tree?snapshot=two", "compare?a=one&b=two&path=a.txt", "revert?since=one&until=two"):
        page.goto(f"{site.url}/w/demo/{path}")
        assert page.evaluate(FAINT) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


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
    with without_problems(context.new_page()) as page:
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


# What a finger cannot hit: controls that are less than 40 pixels wide or high.
SMALL = """() => [...document.querySelectorAll("a, button, summary, select, input:not([type=hidden])")]
  .filter((each) => each.checkVisibility())
  .map((each) => each.type === "checkbox" ? each.closest("label") : each)
  .filter((each) => Math.min(each.getBoundingClientRect().width, each.getBoundingClientRect().height) < 40)
  .map((each) => each.outerHTML)"""
CONTROLS = ("button", "checkbox", "combobox", "link", "textbox", "DisclosureTriangle")


def nameless(page: Page) -> list[object]:
    """The controls for which a screen reader has no name."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    controls = [each for each in nodes if not each["ignored"] and each["role"]["value"] in CONTROLS]
    assert controls
    return [each for each in controls if not each.get("name", {}).get("value")]


@pytest.mark.usefixtures("story")
def test_each_page_suits_a_phone_and_a_screen_reader(page: Page, site: Site, root: Path, workspace: Workspace) -> None:
    long, state = "n" * 255, "s" * 128
    (root / long).write_text("long " * 500 + "x" * 5000)
    workspace.snapshot(state, tag="claude:tool session=a-session id=toolu_1: Bash: make")
    (root / long).write_text("other")
    page.set_viewport_size({"width": 360, "height": 640})
    with workspace.fork(root.parent / "f", name="f" * 60):
        (root.parent / "f" / long).write_text("of the fork")
        for path in (
            "", "w/demo/", "w/demo/tree", f"w/demo/file?path={long}", "w/demo/changes", "w/demo/restore?snapshot=one",
            f"w/demo/compare?a={state}&path={long}", "w/demo/compare?a=one&b=two&path=a.txt", "w/demo/fork", "w/none/",
            "w/demo/conflicts", "w/demo/revert?session=a-session", f"w/demo/merge?fork={'f' * 60}",
            f"w/demo/adopt?fork={'f' * 60}", "w/demo/drop?snapshot=one",
        ):  # fmt: skip
            page.goto(f"{site.url}/{path}")
            page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
            assert overflow(page) <= 0, path
            assert page.evaluate(SMALL) == [], path
            assert nameless(page) == [], path
    page.goto(f"{site.url}/w/demo/compare?a=one&b=two&path=a.txt")
    assert page.locator("tr.changed").inner_text().split() == ["2", "second", "2", "SECOND"]


def test_the_tab_key_leads_to_each_control_and_shows_where_it_is(page: Page, site: Site, story: None) -> None:
    page.goto(f"{site.url}/w/demo/")
    controls = page.evaluate("""() => {
      document.querySelectorAll("details").forEach((each) => { each.open = true; });
      window.left = new Set(document.querySelectorAll("a, button, summary, input:not([type=hidden])"));
      return window.left.size;
    }""")
    for _ in range(controls):
        page.keyboard.press("Tab")
        assert page.evaluate("""() => {
          window.left.delete(document.activeElement);
          const style = getComputedStyle(document.activeElement);
          return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
        }""")
    assert page.evaluate("window.left.size") == 0


def test_conflicts_of_forks_and_a_revert_of_a_range_by_keyboard(
    keyboard: Page, site: Site, workdir: Path, root: Path, workspace: Workspace, story: None
) -> None:
    page = keyboard
    with workspace.fork(workdir / "f1", name="f1"), workspace.fork(workdir / "f2", name="f2"):
        for fork in ("f1", "f2"):
            (workdir / fork / "a.txt").write_text(f"{fork}\n")
        (workdir / "f2" / "src/new").write_text("of f2")
        (root / "src/new").write_text("newer")
        page.goto(f"{site.url}/w/demo/")
        press(page, "a:text-is('Conflicts')")
        heading(page, "Conflicts of demo and its forks")
        rows = page.locator(".matrix tr").all_inner_texts()
        assert [row.split() for row in rows] == [
            ["f1", "f2"],
            ["demo", "-", "1", "path,", "1", "conflict"],
            ["f1", "1", "path,", "1", "conflict"],
        ]
        press(page, ".matrix a[href='#f1:f2']")
        assert page.inner_text("h2:has-text('f1 and f2') + ul").startswith("a.txt: content")
        press(page, "a[aria-label='Merge f2 into demo']")
        heading(page, "Merge f2 into demo?")
    page.goto(f"{site.url}/w/demo/changes?a=one&b=two")
    press(page, "a:text-is('Revert these changes…')")
    heading(page, "Revert one..two, and keep everything later?")
    assert "src/new" in page.inner_text("ul.problem")
    press(page, "select[name=conflicts]", "ArrowDown")
    press(page, "button:text-is('Show')")
    page.wait_for_selector("button:text-is('Revert')")
    press(page, "button:text-is('Revert')")
    heading(page, "Reverted one..two")
    assert (root / "a.txt").read_text() == "first\nsecond\nthird\n"
    assert (root / "src/new").read_text() == "newer"
    press(page, "button:text-is('Undo')")
    heading(page, "Undid")
    assert "SECOND" in (root / "a.txt").read_text()


@pytest.mark.extended
def test_the_pictures_of_the_docs_are_made(browser: Browser, site: Site, workdir: Path, tmp_path: Path) -> None:
    with example(workdir):
        take_pictures(browser, site, tmp_path)
    docs = Path(__file__).parents[2] / "docs"
    for name in PICTURES:
        assert (tmp_path / name).read_bytes().startswith(PNG[:8])
        assert f"({name})" in (docs / "audit.md").read_text()
        assert (docs / name).exists()


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
