"""Faults of the network and of the store: retried, or named; damage is never used."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from protocol.store import DamagedError, Store
from protocol.store.object_store import RemoteStore, open_storage
from protocol.store.object_store.storage import ObstoreStorage
from tests.support.s3_server import BUCKET, FaultyProxy, options
from tests.unit.protocol.store.object_store.conftest import PREFIXES, taken

KEY = "host:/w"


@pytest.fixture
def proxy(s3_port: int) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_port) as started:
        yield started


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/faults-{next(PREFIXES)}"


def remote(url: str, port: int, patience_s: float = 20.0) -> RemoteStore:
    return RemoteStore(open_storage(url, options(port), patience_s=patience_s))


def reach(store: ObstoreStorage) -> None:
    """Return when the server has answered once: until then `patience_s` bounds each attempt, on a busy machine too."""
    for _ in range(60):
        with contextlib.suppress(OSError):
            store.list("names").result()
            return
    raise AssertionError("no answer")


@pytest.fixture
def scene(local: Store, root: Path) -> Store:
    made = random.Random(1)
    for number in range(30):
        (root / f"f{number}").write_bytes(made.randbytes(2000))
    (root / "large").write_bytes(made.randbytes(5 << 20))
    taken(local, "one", root)
    return local


@pytest.mark.extended
@pytest.mark.parametrize("fault", ["503", "429", "500", "reset", "truncate", "lost"])
def test_a_passing_fault_is_retried(fault: str, proxy: FaultyProxy, url: str, scene: Store, tmp_path: Path) -> None:
    failed: set[tuple[str, str]] = set()

    def once(method: str, path: str) -> str | None:
        if (method, path) in failed:
            return None
        failed.add((method, path))
        return fault

    proxy.fault = once
    with remote(url, proxy.port) as store:
        assert store.push(scene, KEY, "one").is_new
        assert store.get("one").generation.number == 1  # a create whose answer was lost was not made twice
    failed.clear()
    with remote(url, proxy.port) as store, Store(tmp_path / "other") as other:
        store.pull(other, store.get("one"), workspace="x")
        assert other.check().ok
    proxy.fault = lambda _method, _path: None
    with remote(url, proxy.port) as store:
        assert store.check().ok


def test_random_faults_lose_nothing(proxy: FaultyProxy, url: str, scene: Store, root: Path) -> None:
    made = random.Random(7)
    kinds = ["503", "reset", "lost", "truncate", "500"]
    proxy.fault = lambda _method, _path: made.choice(kinds) if made.random() < 0.15 else None
    with remote(url, proxy.port) as store:
        for number in range(4):
            (root / f"new{number}").write_bytes(made.randbytes(1000))
            taken(scene, f"n{number}", root)
            store.push(scene, KEY, f"n{number}")
        assert [one.name for one in store.all()] == ["n0", "n1", "n2", "n3"]
    proxy.fault = lambda _method, _path: None
    with remote(url, proxy.port) as store:
        assert store.check().ok


def test_a_body_that_was_corrupted_on_its_way_is_read_again(
    proxy: FaultyProxy, url: str, scene: Store, tmp_path: Path
) -> None:
    with remote(url, proxy.port) as store:
        store.push(scene, KEY, "one")
        found = store.get("one")
        store.packs.view()
        failed: set[str] = set()

        def once(_method: str, path: str) -> str | None:
            if ".pack" not in path or path in failed:
                return None
            failed.add(path)
            return "corrupt"

        proxy.fault = once
        with Store(tmp_path / "other") as other:
            store.pull(other, found, workspace="x")
            assert failed
            assert other.check().ok


def test_damage_is_named_and_not_used(proxy: FaultyProxy, url: str, scene: Store, tmp_path: Path) -> None:
    with remote(url, proxy.port) as store:
        store.push(scene, KEY, "one")
        found = store.get("one")
        store.packs.view()
        proxy.fault = lambda _method, path: "corrupt" if ".data.pack" in path else None
        with Store(tmp_path / "other") as other:
            with pytest.raises(DamagedError, match="stored content"):
                store.pull(other, found, workspace="x")
            assert other.snapshots("x") == []
        report = store.check()
    assert not report.ok


def test_a_store_that_does_not_answer_is_named_in_time(proxy: FaultyProxy, url: str, scene: Store) -> None:
    proxy.fault = lambda _method, _path: "503"
    with remote(url, proxy.port, patience_s=0.5) as store, pytest.raises(OSError, match="does not answer") as caught:
        store.push(scene, KEY, "one")
    assert caught.value.errno == errno.ETIMEDOUT


@pytest.mark.parametrize(
    ("fault", "number", "advice"),
    [
        ("403 AccessDenied", errno.EACCES, "access denied"),
        ("403 SignatureDoesNotMatch", errno.EACCES, "set AWS_ACCESS_KEY_ID"),
        ("400 ExpiredToken", errno.EACCES, "set AWS_ACCESS_KEY_ID"),
        ("403 RequestTimeTooSkewed", errno.EACCES, "the clock of this machine"),
        ("301 PermanentRedirect", errno.EINVAL, "set AWS_REGION"),
        ("501 NotImplemented", errno.EINVAL, "NotImplemented 501"),
    ],
    ids=str,
)
def test_a_refusal_is_not_repeated_and_says_what_to_do(
    proxy: FaultyProxy, fault: str, number: int, advice: str
) -> None:
    proxy.fault = lambda _method, _path: fault
    # The prefix is a word that the reasons contain.
    with closing(open_storage(f"s3://{BUCKET}/credentials/bucket", options(proxy.port))) as opened:
        for call in (opened.list("names"), opened.read("format"), opened.create("format", b"x")):
            with pytest.raises(OSError, match=advice) as caught:
                call.result()
            assert caught.value.errno == number
    assert len(proxy.requests) == 3


def test_the_caller_is_told_once_that_requests_are_repeated(proxy: FaultyProxy) -> None:
    told: list[str] = []
    opened = open_storage(
        f"s3://{BUCKET}/credentials",
        options(proxy.port),
        patience_s=1.0,
        silence_s=0.1,
        waiting=lambda cause, _s: told.append(cause),
    )
    proxy.fault = lambda _method, _path: "503"
    for _ in range(2):
        with pytest.raises(OSError, match="does not answer"):
            opened.list("names").result()
    opened.close()
    assert told in (["503 SlowDown"], ["no answer yet"]), "on a busy machine the first answer may take long"


def test_a_closed_endpoint_is_named_soon_and_one_that_has_answered_is_tried_again(s3_port: int) -> None:
    url = f"s3://{BUCKET}/x"
    with FaultyProxy(s3_port) as proxy:
        given = options(proxy.port)
        known = open_storage(url, given, patience_s=1.0, refused_s=0.3)
        reach(known)
        proxy.fault = lambda _method, _path: "reset"  # ends the connection that is kept
    with closing(known), pytest.raises(OSError, match="does not answer") as caught:
        known.list("names").result()
    assert caught.value.errno == errno.ETIMEDOUT
    with closing(open_storage(url, given, patience_s=3600, refused_s=0.3)) as closed:
        with pytest.raises(OSError, match=r"cannot be reached \(.*refused\): check its endpoint") as caught:
            closed.list("names").result()
        assert caught.value.errno == errno.EHOSTUNREACH


def test_a_server_that_says_nothing_is_named_and_given_up() -> None:
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given = options(silent.getsockname()[1])
        with closing(
            open_storage(
                f"s3://{BUCKET}/x", given, patience_s=0.5, silence_s=0.1, waiting=lambda cause, _s: told.append(cause)
            )
        ) as opened:
            for call in (opened.list("names"), opened.read("format")):
                with pytest.raises(OSError, match="does not answer") as caught:
                    call.result()
                assert caught.value.errno == errno.ETIMEDOUT
    assert told == ["no answer yet"]


@pytest.mark.parametrize(
    "url",
    ["s3://b/x?y", "s3://b/x#y", "s3://b/50%", "s3://b//x", "s3://b/x/../y", "s3://key:secret@b/x", "file:///x/../y"],
)
def test_a_url_that_its_parser_would_change_is_refused(url: str) -> None:
    with pytest.raises(OSError, match=r"correct it|choose another|in the environment") as caught:
        open_storage(url)
    assert "secret" not in str(caught.value)


def test_an_endpoint_that_is_no_url_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="endpoint is nonsense"):
        open_storage("s3://b/x", {"endpoint": "nonsense"})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(OSError, match="AWS_ENDPOINT_URL is localhost:9000"):
        open_storage("s3://b/x")


def test_an_interrupted_push_uploads_the_rest(
    proxy: FaultyProxy, url: str, scene: Store, root: Path, s3_port: int
) -> None:
    made = random.Random(3)
    for number in range(5):
        (root / f"large{number}").write_bytes(made.randbytes(4 << 20))
    taken(scene, "many", root)
    names = "/names/many"
    proxy.fault = lambda method, path: "503" if method == "PUT" and names in path else None
    with closing(open_storage(url, options(proxy.port), patience_s=1.0)) as opened:
        reach(opened)
        with pytest.raises(OSError, match="does not answer"):
            RemoteStore(opened).push(scene, KEY, "many")
    with remote(url, s3_port) as store:
        report = store.push(scene, KEY, "many")
        assert (report.is_new, report.uploaded_bytes) == (True, 0)
        assert store.check().ok


def test_a_missing_bucket_is_named(scene: Store, s3_port: int) -> None:
    with remote("s3://no-such-bucket/x", s3_port) as store:
        for call in (store.require, lambda: store.push(scene, KEY, "one")):
            with pytest.raises(FileNotFoundError, match="no such bucket"):
                call()


def test_ten_changes_are_pushed_with_few_requests(proxy: FaultyProxy, url: str, scene: Store, root: Path) -> None:
    with remote(url, proxy.port) as store:
        store.push(scene, KEY, "one")
        for number in range(10):
            (root / f"f{number}").write_bytes(b"changed %d" % number)
        taken(scene, "two", root)
        proxy.requests.clear()
        store.push(scene, KEY, "two")
    assert len(proxy.requests) <= 14
