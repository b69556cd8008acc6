"""Who may use the page, and what a browser may do with its answers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.web.conftest import Site
from vfsd.client.workspace import Workspace
from vfsd.web.access import Credentials

FORM = "application/x-www-form-urlencoded"


def test_without_the_token_nothing_is_answered(site: Site) -> None:
    for path in ("/", "/w/demo/", "/static/page.js", "/api/filesystem/meta", "/api/openapi.json", "/?token=wrong"):
        answer = site.request("GET", path, headers={})
        assert answer.status == 401
        assert "vfsd web" in answer.text
    assert site.request("GET", "/", {"cookie": f"vfsd-{site.port}=wrong"}).status == 401
    assert site.request("GET", "/", {"authorization": "Bearer wrong"}).status == 401


def test_the_url_sets_a_cookie_that_scripts_and_other_sites_do_not_get(site: Site) -> None:
    answer = site.request("GET", f"/?token={site.credentials.token}&source=demo", headers={})
    assert answer.status == 200
    name, *attributes = answer.headers["set-cookie"].split("; ")
    assert name == f"vfsd-{site.port}={site.credentials.token}"
    assert {"HttpOnly", "Path=/", "SameSite=strict"} <= set(attributes)
    assert 'content="0; url=/w/demo/"' in answer.text
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert site.request("GET", "/", {"cookie": name}).status == 200


def test_the_page_to_go_to_cannot_leave_the_server_or_bring_markup(site: Site) -> None:
    answer = site.request("GET", f"/?token={site.credentials.token}&source=%2F%2Fevil.example%22%3E", headers={})
    assert "/w/%2F%2Fevil.example%22%3E/" in answer.text


def test_programs_send_the_token_in_a_header(site: Site) -> None:
    bearer = {"authorization": f"Bearer {site.credentials.token}"}
    assert site.request("GET", "/api/openapi.json", bearer).status == 200


def test_a_name_that_resolves_to_this_machine_is_refused(site: Site) -> None:
    for host in ("evil.example", f"evil.example:{site.port}", "127.0.0.1", f"127.0.0.1:{site.port + 1}", ""):
        assert site.request("GET", "/", {**site.headers, "host": host}).status == 421
    assert site.request("GET", "/", {**site.headers, "host": f"localhost:{site.port}"}).status == 200


@pytest.mark.parametrize("origin", ["null", "http://evil.example", "http://127.0.0.1:1", "https://127.0.0.1"])
def test_a_request_of_another_page_is_refused(site: Site, origin: str) -> None:
    assert site.request("GET", "/", {**site.headers, "origin": origin}).status == 403
    assert site.request("POST", "/w/demo/snapshot", {**site.headers, "origin": origin}).status == 403


def test_a_request_that_a_page_of_another_port_makes_is_refused(site: Site, workspace: Workspace) -> None:
    """Such a page is of the same site, so the browser sends the cookie, and with a GET of an image no Origin."""
    for where in ("same-site", "cross-site"):
        fetched = {**site.headers, "sec-fetch-site": where}
        for path in ("/", "/w/demo/", "/api/filesystem/archive", "/static/page.js"):
            assert site.request("GET", path, fetched).status == 403
        # A link to the printed URL may stand anywhere.
        assert site.request("GET", f"/?token={site.credentials.token}", fetched).status == 200
    for where in ("none", "same-origin"):
        assert site.request("GET", "/w/demo/", {**site.headers, "sec-fetch-site": where}).status == 200


def test_a_ticket_opens_the_page_once(site: Site) -> None:
    ticket = site.credentials.new_ticket()
    assert site.request("HEAD", f"/?ticket={ticket}", headers={}).status == 401
    opened = site.request("GET", f"/?ticket={ticket}&source=demo", headers={})
    assert (opened.status, "url=/w/demo/" in opened.text) == (200, True)
    assert ticket not in opened.headers["set-cookie"]
    assert site.request("GET", f"/?ticket={ticket}", headers={}).status == 401
    assert site.request("GET", "/?ticket=", headers={}).status == 401


def test_a_change_needs_its_own_origin_and_the_token_of_the_form(site: Site, workspace: Workspace) -> None:
    form = {**site.headers, "content-type": FORM}
    body = f"form_token={site.credentials.form_token}".encode()
    assert site.request("POST", "/w/demo/snapshot", form, body).status == 403
    form["origin"] = site.url
    assert site.request("POST", "/w/demo/snapshot", form, b"form_token=wrong").status == 403
    assert site.request("POST", "/w/demo/snapshot", form, b"").status == 403
    assert site.request("POST", "/w/demo/snapshot", {**form, "content-type": "text/plain"}, body).status == 415
    assert site.request("POST", "/w/demo/snapshot", form, body + b"&x=" + b"y" * 70_000).status == 413
    assert workspace.snapshots() == []
    assert site.request("POST", "/w/demo/snapshot", form, body).status == 303
    assert [each.name for each in workspace.snapshots()] == ["snap-1"]


def test_every_change_needs_its_own_origin_and_the_token_of_the_form(
    site: Site, workspace: Workspace, story: None
) -> None:
    before, own = [each.name for each in workspace.snapshots()], {**site.headers, "content-type": FORM}
    fields = f"&name=x&snapshot=one&kind=restore&fork=demo&force=yes&mountpoint={workspace.path}-fork"
    token = f"form_token={site.credentials.form_token}"
    pages = ("snapshot", "restore", "drop", "fork", "merge", "revert", "adopt", "apply", "discard")
    for page in pages:
        for headers, body in (
            (own, token),
            ({**own, "origin": "http://127.0.0.1:1"}, token),
            ({**own, "origin": site.url, "sec-fetch-site": "same-site"}, token),
            ({**own, "origin": site.url}, "form_token=wrong"),
            ({**own, "origin": site.url}, f"x_{token}"),
            ({"content-type": FORM, "origin": site.url}, token),
        ):
            answer = site.request("POST", f"/w/demo/{page}", headers, (body + fields).encode())
            assert answer.status in {401, 403}, page
        assert site.request("POST", f"/w/demo/{page}?{token}{fields}", {**own, "origin": site.url}, b"").status == 403
    assert [each.name for each in workspace.snapshots()] == before
    assert Path(workspace.path, "src/new").exists()
    assert not Path(f"{workspace.path}-fork").exists()


def test_no_change_is_made_by_a_get(site: Site, workspace: Workspace, story: None) -> None:
    before = [each.name for each in workspace.snapshots()]
    for page in ("snapshot", "restore?snapshot=one", "drop?snapshot=one", "fork", "merge?fork=demo"):
        site.get(f"/w/demo/{page}")
    assert [each.name for each in workspace.snapshots()] == before


def test_every_answer_has_the_headers(site: Site, workspace: Workspace, story: None) -> None:
    paths = ["/", "/w/demo/", "/w/demo/tree", "/w/none/", "/nowhere", "/static/page.js", "/static/page.css"]
    paths += ["/api/filesystem/meta", "/api/filesystem/file?path=a.txt", "/api/filesystem/archive"]
    for path in paths:
        headers = site.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
    page = site.get("/w/demo/").text
    assert not re.search(r"<script(?! src=\"/static/)|<style| style=| on\w+=", page)
    assert "http" not in re.sub(r"xmlns=\S+", "", page)  # no other server


def test_content_of_the_workspace_is_saved_and_never_run(site: Site, workspace: Workspace) -> None:
    with open(f"{workspace.path}/page.html", "w", encoding="utf-8") as file:
        file.write("<script>alert(1)</script>")
    with open(f"{workspace.path}/picture.svg", "w", encoding="utf-8") as file:
        file.write("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    for name in ("page.html", "picture.svg"):
        for query in ({}, {"as": "image"}):
            answer = site.get("/api/filesystem/file", path=name, **query)
            assert answer.headers["content-type"] == "application/octet-stream"
            assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
            assert answer.headers["content-disposition"].startswith("attachment")
        assert "<script>alert" not in site.get("/w/demo/file", path=name).text


def test_two_servers_have_different_tokens() -> None:
    first, second = Credentials(), Credentials()
    assert len({first.token, second.token, first.form_token, second.form_token}) == 4
    assert len(first.token) >= 43
