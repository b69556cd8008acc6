"""What the pages show and do, without a browser."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import threading
import time
import zipfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import trio
from click.testing import CliRunner
from starlette.requests import ClientDisconnect

from tests.mount.conftest import mounted
from tests.web.conftest import Answer, Site, serving
from vfsd.cli.main import cli
from vfsd.client.workspace import Workspace
from vfsd.web import api, pages
from vfsd.wire.messages import wire_path

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 40
HOSTILE = (
    b"<script>alert(1)<",
    b"\"><img src=x onerror='alert(1)'>",
    "\u202egnp.exe".encode(),
    b"caf\xe9 \xff",
    b"new\nline",
    b"back\\slash",
    b"a?b=c&d#e%20",
    b"{{ 7 * 7 }}",
    b"n" * 255,
)


def test_the_first_page_lists_the_workspaces(site: Site, workspace: Workspace, workdir: Path) -> None:
    words = site.get("/").words
    assert "demo memory" in words
    assert str(workdir / "m") in words


def test_the_policy_is_shown_and_an_archive_says_what_it_lacks(site: Site, workdir: Path) -> None:
    patterns = {"protect": ["<b>.lock"], "hide": [os.fsdecode(b"caf\xe9"), *(f"x{number}" for number in range(30))]}
    with mounted(workdir / "p", name="demo", **patterns) as workspace:
        words = site.get("/w/demo/").words
        assert r"protects &lt;b&gt;.lock hides caf\xe9 hides x0" in words
        assert "hides x29" not in words
        assert "ZIP archives lack what is hidden" in words
        (Path(workspace.path) / "seen").write_text("seen")
        workspace.policy(hide=["seen"])
        assert site.get("/api/filesystem/archive").headers["vfsd-hidden-names"] == "1"


def test_an_attached_directory_has_its_page_too(site: Site, workdir: Path) -> None:
    (workdir / "p").mkdir()
    (workdir / "p" / "file").write_text("one")
    with Workspace.attach_directory(workdir / "p", name="demo", store=workdir / "store") as workspace:
        workspace.snapshot("before")
        answer = site.get("/w/demo/")
        assert (answer.status, "before" in answer.words) == (200, True)


def test_without_a_workspace_it_says_how_to_start_one(site: Site) -> None:
    assert "vfsd mount" in site.get("/").words


def test_the_timeline_has_each_state_with_what_it_changed(site: Site, root: Path, story: None) -> None:
    (root / "later").touch()
    words = site.get("/w/demo/").words
    assert words.index("now") < words.index("two") < words.index("one")
    assert "before" in words
    assert "+2 ~1 &minus;1" in words
    assert "+1 ~0 &minus;0" in words


def test_the_timeline_names_the_programs_that_made_the_changes(site: Site, root: Path, workspace: Workspace) -> None:
    workspace.snapshot("start")
    subprocess.run(["touch", root / "a"], check=True)
    time.sleep(0.01)  # a snapshot's time is in milliseconds
    workspace.snapshot("touched")
    time.sleep(0.01)
    subprocess.run(["cp", root / "a", root / "b"], check=True)
    words = site.get("/w/demo/").words
    now, touched, start = words.index("now"), words.index("touched"), words.index("start")
    assert "by cp" in words[now:touched]
    assert "by touch" in words[touched:start]


def test_a_workspace_without_a_log_has_a_timeline(site: Site, workdir: Path) -> None:
    with mounted(workdir / "q", name="quiet", audit=False) as workspace:
        workspace.snapshot("one")
        assert "one" in site.get("/w/quiet/").words


def test_a_long_timeline_is_paged(site: Site, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "STEPS", 3)
    for number in range(7):
        workspace.snapshot(f"s{number}")
    first = site.get("/w/demo/").text
    assert "s6" in first
    assert ">s3<" not in first
    second = site.get("/w/demo/", before="s5").text
    assert ">s4<" in second.replace("<bdi>", "").replace("</bdi>", "")


def test_a_directory_marks_what_changed(site: Site, story: None) -> None:
    text = site.get("/w/demo/tree", snapshot="two").text
    assert 'title="modified">M' in text
    assert 'title="added">A' in text
    assert "<del><bdi>gone</bdi></del>" in text
    assert "1 change" in text
    assert "gone" in site.get("/w/demo/tree", snapshot="one").words


def test_a_directory_of_many_names_is_paged(site: Site, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ENTRIES", 10)
    names = sorted(f"f{number}" for number in range(25))
    for name in names:
        (root / name).touch()
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        text = site.get("/w/demo/tree", **after).text
        found = [name for name in names if f"<bdi>{name}</bdi>" in text]
        assert len(found) <= 10
        seen += found
        if 'rel="next"' not in text:
            break
        after = {"after": found[-1]}
    assert seen == names


def test_a_file_is_shown_as_it_was(site: Site, story: None) -> None:
    assert "second" in site.get("/w/demo/file", path="a.txt", snapshot="one").words
    assert "SECOND" in site.get("/w/demo/file", path="a.txt").words
    assert site.get("/api/filesystem/file", path="a.txt", snapshot="one").body == b"first\nsecond\nthird\n"


def test_a_long_file_is_paged_and_downloaded_whole(site: Site, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_CHUNK_BYTES", 4096)
    content = b"".join(b"line %d\n" % number for number in range(40_000))
    (root / "long").write_bytes(content)
    first = site.get("/w/demo/file", path="long")
    assert "line 0" in first.text
    assert 'rel="next"' in first.text
    assert "line 39999" in site.get("/w/demo/file", path="long", offset=str(len(content) - 100)).text
    answer = site.get("/api/filesystem/file", path="long")
    assert answer.body == content
    assert answer.headers["content-length"] == str(len(content))


def test_binary_files_and_special_files_are_named(site: Site, root: Path) -> None:
    (root / "bin").write_bytes(b"\0\1\2")
    (root / "picture").write_bytes(PNG)
    os.mkfifo(root / "fifo")
    (root / "nowhere").symlink_to("missing")
    assert "not text" in site.get("/w/demo/file", path="bin").words
    assert "special file" in site.get("/w/demo/file", path="fifo").words
    assert "leads nowhere" in site.get("/w/demo/tree", path="").text or "symlink" in site.get("/w/demo/tree").words
    assert "<img" in site.get("/w/demo/file", path="picture").text
    image = site.get("/api/filesystem/file", path="picture", **{"as": "image"})
    assert image.headers["content-type"] == "image/png"
    assert image.body == PNG


def test_two_states_side_by_side(site: Site, story: None) -> None:
    text = site.get("/w/demo/compare", a="one", b="two", path="a.txt").text
    assert '<td class="old"><code>second</code></td>' in text
    assert '<td class="new"><code>SECOND</code></td>' in text
    assert '<tr class="added">' in text
    assert "the same in both" in site.get("/w/demo/compare", a="two", path="a.txt").words
    words = site.get("/w/demo/changes", a="one", b="two").words
    assert "a.txt" in words
    assert "src/new" in words


def test_a_page_waits_for_what_it_counts_only_if_asked(
    site: Site, story: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SOON_S", 0.0)
    for path, query, counted in (("/w/demo/", {}, "~1"), ("/w/demo/tree", {"snapshot": "two"}, "gone")):
        early = site.get(path, **query)
        assert (early.status, "Wait for" in early.words, counted in early.words) == (200, True, False)
        whole = site.get(path, **query, wait="1")
        assert (whole.status, "Wait for" in whole.words, counted in whole.words) == (200, False, True)


def test_a_list_of_changes_is_paged_and_its_counts_may_come_later(
    site: Site, root: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.snapshot("empty")
    names = sorted(f"f{number}" for number in range(25))
    for name in names:
        (root / name).touch()
    workspace.snapshot("full")
    monkeypatch.setattr(pages, "CHANGES", 10)
    for soon_s, wait in ((60.0, {}), (0.0, {}), (0.0, {"wait": "1"})):
        monkeypatch.setattr(pages, "SOON_S", soon_s)
        start, seen = "0", []
        while True:
            answer = site.get("/w/demo/changes", a="empty", b="full", start=start, **wait)
            found = [name for name in names if f"<bdi>{name}</bdi>" in answer.text]
            assert 0 < len(found) <= 10
            seen += found
            following = re.search(r'rel="next" href="[^"]*start=(\d+)', answer.text)
            assert ("Wait for the counts" in answer.words) == ("+25 ~0" not in answer.words)
            if soon_s or wait or following is None:  # the last page waits for the end of the list, so it has the counts
                assert "+25 ~0" in answer.words
            if following is None:
                break
            start = following[1]
        assert seen == names
    assert site.get("/w/demo/changes", a="empty", b="full", path="nowhere").status == 404


def test_two_images_side_by_side(site: Site, workspace: Workspace, root: Path) -> None:
    (root / "p.png").write_bytes(PNG)
    workspace.snapshot("one")
    (root / "p.png").write_bytes(PNG + b"more")
    assert site.get("/w/demo/compare", a="one", path="p.png").text.count("<img") == 2


def test_a_restore_shows_what_it_would_change_and_can_be_undone(site: Site, root: Path, story: None) -> None:
    page = site.get("/w/demo/restore", snapshot="one")
    assert "a.txt" in page.words
    assert (root / "a.txt").read_text().startswith("first\nSECOND")
    done = site.post("/w/demo/restore", **site.form("/w/demo/restore", snapshot="one"))
    assert "Restored everything from one: 1 added, 1 modified, 2 removed" in done.words
    assert "safety-1" in done.words
    assert (root / "gone").exists()
    undone = site.post("/w/demo/restore", **site.form("/w/demo/restore", kind="undo"))
    assert "Undid restore one" in undone.words
    assert not (root / "gone").exists()
    assert "Redo" in site.get("/w/demo/").words
    site.post("/w/demo/restore", **site.form("/w/demo/restore", kind="redo"))
    assert (root / "gone").exists()


def test_a_form_that_is_sent_twice_or_from_two_tabs_undoes_one_step(
    site: Site, workspace: Workspace, root: Path, story: None
) -> None:
    workspace.restore("one")
    (root / "between").touch()
    workspace.restore("two")
    undo = site.form("/w/demo/restore", kind="undo")
    answers: list[Answer] = []
    tabs = [threading.Thread(target=lambda: answers.append(site.post("/w/demo/restore", **undo))) for _ in range(2)]
    for tab in tabs:
        tab.start()
    for tab in tabs:
        tab.join()
    assert sorted(answer.status for answer in answers) == [200, 409]
    (refused,) = (answer for answer in answers if answer.status == 409)
    assert "another step was made or undone meanwhile" in refused.words
    assert (root / "between").exists()
    redo = site.form("/w/demo/restore", kind="redo")
    assert site.post("/w/demo/restore", **redo).status == 200
    assert site.post("/w/demo/restore", **redo).status == 404  # nothing is left to redo
    assert not (root / "between").exists()


def test_one_path_is_restored(site: Site, root: Path, story: None) -> None:
    site.post("/w/demo/restore", **site.form("/w/demo/restore", snapshot="one", path="gone"))
    assert (root / "gone").exists()
    assert (root / "src/new").exists()


def test_a_snapshot_that_took_over_the_name_is_not_restored_or_dropped(
    site: Site, workspace: Workspace, root: Path, story: None
) -> None:
    restore, drop = site.form("/w/demo/restore", snapshot="one"), site.form("/w/demo/drop", snapshot="one")
    workspace.drop("one")
    gone = site.post("/w/demo/restore", **restore)
    assert (gone.status, "no snapshot one" in gone.words) == (404, True)
    workspace.snapshot("one")
    assert "another one of the same name" in site.post("/w/demo/restore", **restore).words
    assert "another one of the same name" in site.post("/w/demo/drop", **drop).words
    assert (root / "src/new").exists()


def test_snapshots_are_taken_and_dropped(site: Site, workspace: Workspace, story: None) -> None:
    assert "Snapshot three was taken" in site.post("/w/demo/snapshot", name="three", tag="<b>remark").words
    assert "&lt;b&gt;remark" in site.get("/w/demo/").text
    taken = site.post("/w/demo/snapshot", name="three")
    assert (taken.status, "three" in taken.words) == (409, True)
    assert "cannot be undone" in site.get("/w/demo/drop", snapshot="three").words
    assert "was dropped" in site.post("/w/demo/drop", **site.form("/w/demo/drop", snapshot="three")).words
    assert [each.name for each in workspace.snapshots()] == ["one", "two"]
    assert site.post("/w/demo/snapshot", name="a/b").status == 400


def test_a_change_is_reverted_and_later_ones_stay(site: Site, workspace: Workspace, root: Path) -> None:
    workspace.snapshot("one")
    (root / "doomed").write_text("x")
    workspace.snapshot("toolu_1", tag="claude:tool session=s id=toolu_1: Bash: make")
    (root / "later").write_text("y")
    workspace.snapshot("two")
    timeline = site.get("/w/demo/").text
    assert "revert?tool_call=toolu_1" in timeline
    assert "revert?since=toolu_1&amp;until=two" in timeline
    assert "revert?session=s" in timeline
    assert "revert?since=one&amp;until=two" in site.get("/w/demo/changes", a="one", b="two").text
    assert "revert?" not in site.get("/w/demo/changes", a="two", b="one").text  # not in the order of their times
    page = site.get("/w/demo/revert", tool_call="toolu_1")
    assert "Revert tool call toolu_1, and keep everything later?" in page.words
    done = site.post("/w/demo/revert", **site.form("/w/demo/revert", tool_call="toolu_1"))
    assert "Reverted tool call toolu_1: 1 removed." in done.words
    assert not (root / "doomed").exists()
    assert (root / "later").exists()
    assert "Undid" in site.post("/w/demo/restore", **site.form("/w/demo/restore", kind="undo")).words
    done = site.post("/w/demo/revert", **site.form("/w/demo/revert", session="s", path="doomed"))
    assert "Reverted session s in doomed: 1 removed." in done.words
    assert not (root / "doomed").exists()


def test_a_fork_is_made_and_merged(site: Site, workdir: Path, root: Path, story: None) -> None:
    made = site.post("/w/demo/fork", mountpoint=str(workdir / "f"), name="try")
    assert "The fork try is mounted" in made.words
    with Workspace.attach("try") as fork:
        try:
            (workdir / "f" / "of-fork").touch()
            page = site.get("/w/demo/merge", fork="try")
            assert "of-fork" in page.words
            assert not (root / "of-fork").exists()
            merged = site.post("/w/demo/merge", **site.form("/w/demo/merge", fork="try"))
            assert "Merged try: 1 added" in merged.words
            assert (root / "of-fork").exists()
            (root / "both").write_text("here")
            (workdir / "f" / "both").write_text("there")
            assert "both" in site.get("/w/demo/merge", fork="try").words.partition("Conflicts")[2]
            assert "Nothing was changed" in site.post("/w/demo/merge", fork="try").words
        finally:
            fork.unmount()
    refused = site.post("/w/demo/fork", mountpoint="relative")
    assert (refused.status, "absolute" in refused.words) == (400, True)


def test_a_failed_fork_leaves_no_directory(site: Site, workdir: Path, story: None) -> None:
    assert site.post("/w/demo/fork", mountpoint=str(workdir / "f"), snapshot="none").status == 404
    assert not (workdir / "f").exists()


@pytest.mark.parametrize(
    "page", ["", "tree", "file?path=a.txt", "changes", "restore?snapshot=one", "drop?snapshot=one"]
)
def test_a_workspace_that_ended_is_a_clear_page(site: Site, page: str) -> None:
    answer = site.get(f"/w/gone/{page}")
    assert answer.status == 404
    assert "no workspace gone" in answer.words


def test_a_daemon_that_died_is_a_clear_page(site: Site, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workdir)  # `vfsd unmount` changes the directory
    workspace = Workspace.mount(workdir / "d", name="dying")
    try:
        os.kill(workspace.status().pid, signal.SIGKILL)
        while "dead" not in site.get("/").words:
            time.sleep(0.02)
        answer = site.get("/w/dying/")
        assert answer.status == 503
        assert "dead" in answer.words
        assert site.get("/api/filesystem/meta", workspace="dying").status == 503
    finally:
        assert CliRunner().invoke(cli, ["unmount", "dying"]).exit_code == 0


def test_what_does_not_exist_or_is_wrong_is_a_clear_page(site: Site, story: None) -> None:
    for path, status in (
        ("/w/demo/tree?path=none", 404),
        ("/w/demo/tree?snapshot=none", 404),
        ("/w/demo/file?path=none&snapshot=one", 404),
        ("/w/demo/file?path=a.txt&offset=x", 400),
        ("/w/demo/tree?path=%5Cq", 400),
        ("/w/demo/tree?path=..%2F..%2Fetc", 404),
        ("/w/demo/restore?kind=other", 400),
        ("/w/demo/restore?snapshot=none", 404),
        ("/w/demo/merge?fork=none", 404),
        ("/w/demo/nowhere", 404),
        ("/w/..%2F..%2Fetc/", 404),
    ):
        answer = site.get(path)
        assert answer.status == status, path
        assert "Traceback" not in answer.text
        assert len(answer.words) < 400


def test_hostile_names_are_shown_and_reached(site: Site, root: Path, workspace: Workspace) -> None:
    for number, name in enumerate(HOSTILE):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_text(f"content {number}")
    workspace.snapshot("all")
    for path in ("/w/demo/tree", "/w/demo/tree?snapshot=all"):
        text = site.get(path).text
        assert "<script>alert" not in text
        assert "<img" not in text
        assert "\u202e" not in text
        assert "\\xe2\\x80\\xae" in text
        assert "caf\\xe9 \\xff" in text
    for number, name in enumerate(HOSTILE):
        path = wire_path(name)
        assert f"content {number}" in site.get("/w/demo/file", path=path, snapshot="all").words
        answer = site.get("/api/filesystem/file", path=path)
        assert answer.body == f"content {number}".encode()
        assert quote(path, safe="") in answer.headers["content-disposition"]
        assert f"path={quote(path, safe='')}" in site.get("/w/demo/tree").text.replace("+", "%20")


def test_hostile_content_is_text(site: Site, root: Path) -> None:
    (root / "f").write_text("</pre><script>alert(1)</script>\u202e\x1b[31m")
    text = site.get("/w/demo/file", path="f").text
    assert "<script>alert" not in text
    assert "\\u202e\\u001b[31m" in text


@pytest.mark.parametrize("backend", ["overlay", "host"])
def test_the_states_of_other_backends(site: Site, workdir: Path, backend: str) -> None:
    (workdir / "below").mkdir()
    (workdir / "below" / "old").write_text("old")
    with mounted(workdir / "o", name="other", backend=f"{backend}:{workdir / 'below'}") as workspace:
        root = Path(workspace.path)
        workspace.snapshot("one")
        (root / "old").write_text("changed")
        (root / "new").touch()
        assert "+1" in site.get("/w/other/").words
        assert "old" in site.get("/w/other/file", path="old", snapshot="one").words
        assert "changed" in site.get("/w/other/file", path="old").words
        assert "new" not in site.get("/w/other/tree", snapshot="one").words.partition("Mode")[2]
        assert 'title="modified">M' in site.get("/w/other/tree").text
        assert "code" in site.get("/w/other/compare", a="one", path="old").text
        site.post("/w/other/restore", **site.form("/w/other/restore", snapshot="one"))
        assert (root / "old").read_text() == "old"


def test_the_api_is_as_its_description_says(site: Site, workspace: Workspace, root: Path, story: None) -> None:
    described = json.loads(site.get("/api/openapi.json").body)
    assert described["openapi"].startswith("3.")
    for path, methods in described["paths"].items():
        assert set(methods) == {"get"}
        assert site.get(path, path="a.txt" if path.endswith("file") else "").status == 200
    schemas = described["components"]["schemas"]
    meta = json.loads(site.get("/api/filesystem/meta", workspace="demo", snapshot="one").body)
    assert set(meta) == set(schemas["Meta"]["required"])
    assert set(meta["manifest"]) == set(schemas["Manifest"]["required"])
    assert meta["manifest"]["file_count"] == 2
    assert meta["summary"]["tag"] == "before"
    tree = json.loads(site.get("/api/filesystem/tree", snapshot="two", limit="2").body)
    assert [each["path"] for each in tree["entries"]] == ["a.txt", "src"]
    assert tree["truncated"] is False
    assert all(
        set(schemas["FsEntry"]["required"]) <= set(each) <= set(schemas["FsEntry"]["properties"])
        for each in tree["entries"]
    )
    assert [each["path"] for each in json.loads(site.get("/api/filesystem/tree", after="a.txt").body)["entries"]] == [
        "src"
    ]
    error = json.loads(site.get("/api/filesystem/file", path="none").body)["error"]
    assert (error["errno"], set(error)) == ("ENOENT", set(schemas["Problem"]["required"]))
    assert site.get("/api/filesystem/file", path="src").status == 400


def test_a_state_is_downloaded_as_an_archive(site: Site, story: None) -> None:
    answer = site.get("/api/filesystem/archive", workspace="demo", snapshot="one")
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''demo-one.zip"
    with zipfile.ZipFile(io.BytesIO(answer.body)) as archive:
        assert archive.read("files/a.txt") == b"first\nsecond\nthird\n"
    assert site.get("/api/filesystem/archive", snapshot="none").status == 404


def test_a_file_that_changes_while_it_is_downloaded_is_not_mixed(
    site: Site, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "_CHUNK_BYTES", 1000)
    (root / "f").write_bytes(b"a" * 5000)
    pieces = api._pieces

    def changed_meanwhile(source: object, path: str, *others: object) -> object:
        (root / "f").write_bytes(b"b" * 5000)
        return pieces(source, path, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(api, "_pieces", changed_meanwhile)
    connection_fails = False
    try:
        body = site.get("/api/filesystem/file", path="f").body
    except Exception:
        connection_fails = True
    assert connection_fails or len(body) < 5000


def test_archives_are_shown_without_a_mount(workdir: Path, story: None, workspace: Workspace) -> None:
    workspace.export(workdir / "session.fs.zip", snapshot="one")
    (workdir / "session.jsonl").write_text("{}\n")
    with serving(str(workdir / "session.jsonl")) as site:
        assert "session.fs.zip" in site.get("/").words
        key = "archive:1"
        assert "gone" in site.get(f"/w/{key}/tree").words
        assert "second" in site.get(f"/w/{key}/file", path="a.txt").words
        assert site.get(f"/w/{key}/").status == 303
        meta = json.loads(site.get("/api/filesystem/meta", workspace=key).body)
        assert meta["manifest"]["file_count"] == 2
        assert meta["manifest"]["created_at"]
        assert site.get("/api/filesystem/file", workspace=key, path="gone").body == b"x"
        assert site.get("/api/filesystem/archive", workspace=key).body == (workdir / "session.fs.zip").read_bytes()
        assert site.get(f"/w/{key}/restore", snapshot="one").status == 404
        assert site.get(f"/w/{key}/tree", snapshot="one").status == 404


def test_an_open_page_is_told_about_changes(site: Site, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import http.client

    from vfsd.web import api

    monkeypatch.setattr(api, "PERIOD_S", 0.02)
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=20)
    try:
        connection.request("GET", "/events?workspace=demo", headers=site.headers)
        stream = connection.getresponse()
        assert stream.readline() == b"event: ready\n"
        (root / "new").touch()
        while stream.readline() != b"event: change\n":
            pass
    finally:
        connection.close()
    assert site.get("/events", workspace="none").status == 404


def test_no_more_pages_than_the_limit_follow_changes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    import http.client

    from vfsd.web import api

    monkeypatch.setattr(api, "_MOST_OPEN", 3)
    monkeypatch.setattr(api, "PERIOD_S", 0.02)
    connections = [http.client.HTTPConnection("127.0.0.1", site.port, timeout=20) for _ in range(12)]
    try:
        for connection in connections:  # all of them before the first answer
            connection.request("GET", "/events", headers=site.headers)
        answers = [connection.getresponse().status for connection in connections]
        assert sorted(answers) == [200] * 3 + [503] * 9
    finally:
        for connection in connections:
            connection.close()

    def open_page() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=20)
        connection.request("GET", "/events", headers=site.headers)
        status = connection.getresponse().status
        connection.close()
        return status == 200

    while not open_page():  # the server notices at its next event that the others are closed
        time.sleep(0.01)


def test_a_fork_is_adopted_and_own_changes_are_replaced_only_after_a_tick(
    site: Site, workdir: Path, root: Path, story: None
) -> None:
    site.post("/w/demo/fork", mountpoint=str(workdir / "f"), name="try")
    with Workspace.attach("try") as fork:
        try:
            (workdir / "f" / "of-fork").touch()
            (root / "own").write_text("only here")
            page = site.get("/w/demo/adopt", fork="try")
            assert "own" in page.words.partition("Changes that only demo has")[2].partition("They would be replaced")[0]
            assert not (root / "of-fork").exists()
            refused = site.post("/w/demo/adopt", **site.form("/w/demo/adopt", fork="try") | {"force": ""})
            assert "Nothing was changed: 1 conflict with try" in refused.words
            assert (root / "own").exists()
            adopted = site.post("/w/demo/adopt", fork="try", force="yes")
            assert "Adopted try: " in adopted.words
            assert (root / "of-fork").exists()
            assert not (root / "own").exists()
            site.post("/w/demo/restore", **site.form("/w/demo/restore", kind="undo"))
            assert (root / "own").exists()
        finally:
            fork.unmount()


def test_changes_of_an_overlay_are_applied_and_discarded(site: Site, workdir: Path) -> None:
    below, above = workdir / "below", workdir / "above"
    below.mkdir()
    (below / "old").write_text("old")
    # The kernel may still hold the file open when it changes below, which the log tells.
    with mounted(above, may_say="changed a file below", name="over", backend=f"overlay:{below}"):
        (above / "new").write_text("new")
        (above / "old").write_text("mine")
        assert "Apply" in site.get("/w/over/").words
        page = site.get("/w/over/discard", path="old").words
        assert "old" in page
        discarded = site.post("/w/over/discard", **site.form("/w/over/discard", path="old"))
        assert "Discarded: 1 modified" in discarded.words
        assert ((above / "old").read_text(), (above / "new").exists()) == ("old", True)
        site.post("/w/over/restore", **site.form("/w/over/restore", kind="undo"))
        (below / "old").write_text("of another program")
        assert "old" in site.get("/w/over/apply").words.partition("Conflicts")[2]
        refused = site.post("/w/over/apply", **site.form("/w/over/apply") | {"force": ""})
        assert f"Nothing was written to {below}: 1 conflict" in refused.words
        assert not (below / "new").exists()
        applied = site.post("/w/over/apply", force="yes")
        assert f"Applied to {below}: 1 added, 1 modified" in applied.words
        assert ((below / "old").read_text(), (below / "new").read_text()) == ("mine", "new")
        assert "Nothing would change" in site.get("/w/over/apply").words
    assert site.get("/w/demo/apply").status == 404


def test_a_stream_is_ended_when_its_client_leaves_between_two_pieces() -> None:
    ended = []

    async def pieces() -> AsyncGenerator[str]:
        try:
            while True:
                yield "piece"
        finally:
            ended.append(True)

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):
            raise OSError(32, "it has left")

    async def answer() -> None:
        with contextlib.suppress(ClientDisconnect):
            await api._Streamed(pieces())({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
        assert ended == [True]

    trio.run(answer)
