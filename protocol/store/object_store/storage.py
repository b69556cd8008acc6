"""Storage: the operations on an object store, through `obstore`.

Uses only what S3, GCS, Azure and a directory have in common: create an object that does not exist, read a range, list,
delete.  Objects are never overwritten.

Retries: a request that fails for a reason that may pass (429, 5xx, a time-out, a dropped connection, a short body) is
repeated with exponential backoff and jitter until `patience_s` have passed.  A create whose answer was lost is
repeated, too: if the object then exists with the same content, the create succeeded.  Until the first answer of any
kind the server counts as unknown: refused connections are repeated for `refused_s` only, because the endpoint is
probably wrong, and no attempt takes longer than `patience_s`.

Threading: any thread calls the methods; the requests run on an event loop in a thread of their own, at most
`_PARALLEL` at once.  `obstore` has more threads, so a process that uses a `Storage` must not fork.

`obstore` reports most failures as one kind of error, with the server's answer in its text.  So this module reads the
text, to tell failures that may pass from others.  A text that is not known means a failure that may pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from protocol.store.object_store.packs import CONDEMNED, FORMAT, NAMES, PACKS, REPAIRED

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
_PARALLEL: Final = 16
_FIRST_DELAY_S: Final = 0.1
_LONGEST_DELAY_S: Final = 8.0
_PATIENCE_S: Final = 60.0
_CLOSE_S: Final = 2.0
_TIMEOUT: Final = "120s"  # of one request with its body: 8 MiB at 70 KB/s
_CONNECT_TIMEOUT: Final = "10s"
# Options of the connection; all others are options of the kind of store.
_CLIENT_OPTIONS: Final = frozenset({
    "allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only", "pool_idle_timeout",
    "pool_max_idle_per_host", "proxy_url", "timeout", "user_agent",
})  # fmt: skip
# The entries that a directory of file:/// may have: see `packs`.
_NAMES_OF_A_STORE: Final = frozenset({FORMAT, NAMES, PACKS, CONDEMNED, REPAIRED})
_PATH_STYLE: Final = "path_style"
_ENDPOINT: Final = re.compile(r"(.*_)?endpoint(_url)?(_s3)?")
_SILENCE_S: Final = 3.0
_REFUSED_S: Final = 4.0


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a listing.  `modified_s` is the store's own time, in seconds since the epoch."""

    key: str
    size_bytes: int
    modified_s: float


Objects: TypeAlias = list[ObjectInfo]
Waiting: TypeAlias = Callable[[str, float], object]


class Storage(Protocol):
    """The objects below one URL.  A key is a path of names without special characters.

    Every method may raise OSError: EACCES, ENOENT for a missing bucket, ETIMEDOUT when the retries did not help.
    """

    url: str

    def create(self, key: str, data: bytes) -> Future[bool]:
        """Create an object.  False if another one has the key."""
        ...

    def read(self, key: str) -> Future[bytes]:
        """Read an object.  FileNotFoundError."""
        ...

    def read_range(self, key: str, start: int, length: int) -> Future[bytes]:
        """Read `length` bytes of an object from `start`, which it has.  FileNotFoundError."""
        ...

    def list(self, prefix: str) -> Future[Objects]:
        """The objects whose keys begin with the directory `prefix`, sorted by key."""
        ...

    def delete(self, key: str) -> Future[None]:
        """Delete an object, if it exists."""
        ...

    def close(self) -> None:
        """End the requests that are running, which then fail."""
        ...


def open_storage(
    url: str, options: Mapping[str, str] = MappingProxyType({}), *, patience_s: float = _PATIENCE_S,
    refused_s: float = _REFUSED_S, silence_s: float = _SILENCE_S,
    waiting: Waiting = lambda _cause, _left_s: None, makes_directory: bool = True, late: bool = False,
) -> ObstoreStorage:  # fmt: skip
    """Open the objects below `url`: s3://BUCKET/PREFIX, gs://, az:// or file:///DIRECTORY.

    `options` are those of `obstore`, for the store or the connection; and "path_style", "true" for S3 servers that are
    not reached as BUCKET.HOST.  Credentials come from the environment.  `patience_s` and `refused_s`: for how long
    requests are repeated; see the module's docstring.  `waiting` is called once, from another thread, when a request
    has failed for `silence_s`, or the first one has no answer: with the cause, and for how many seconds it will be
    repeated.
    `makes_directory`: make the directory of file:///, if there is none; otherwise FileNotFoundError.
    `late`: open the store when it is used first, and again as long as that fails; refused connections are then repeated
    as others are.

    ImportError without `obstore`; OSError (EINVAL).
    """

    def opening() -> ObjectStore:
        return _opened(url, options, makes_directory=makes_directory)

    refused_s = patience_s if late else min(refused_s, patience_s)
    return ObstoreStorage(url, None if late else opening(), opening, patience_s, refused_s, silence_s, waiting)


def _opened(url: str, options: Mapping[str, str], *, makes_directory: bool) -> ObjectStore:
    from obstore.store import from_url  # noqa: PLC0415 an optional dependency

    client: dict[str, Any] = {"timeout": _TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT}
    allow_http = os.environ.get("AWS_ALLOW_HTTP")
    if allow_http:
        client["allow_http"] = allow_http
    config: dict[str, Any] = {}
    for name, value in options.items():
        key = name.removeprefix("aws_").lower()
        if key in _CLIENT_OPTIONS:
            client[key] = value
        elif key == _PATH_STYLE:
            config["virtual_hosted_style_request"] = _negated(value, url)
        else:
            config[name] = value
    scheme = url.partition("://")[0]
    if scheme not in {"s3", "gs", "az", "file"}:
        advice = "not a store's URL: write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIR"
        raise OSError(errno.EINVAL, advice, url)
    _check_path(scheme, url)
    _check_endpoint(url, config)
    # Retries are made here, because those of `obstore` do not cover a create.
    arguments: dict[str, Any] = {} if scheme == "file" else {
        "config": config or None, "client_options": client, "retry_config": {"max_retries": 0},
    }  # fmt: skip
    if scheme == "file":
        arguments["mkdir"] = makes_directory
        _check_directory(url, makes_directory=makes_directory)
    try:
        return from_url(url, **arguments)
    except Exception as error:  # noqa: BLE001 (those of `obstore` have no other common base)
        raise OSError(errno.EINVAL, f"cannot open the store: {first_line(error)}", url) from None


def _negated(path_style: str, url: str) -> str:
    """The option of `obstore` for a value of "path_style".  EINVAL."""
    for negated, words in (("false", {"true", "1", "yes"}), ("true", {"false", "0", "no"})):
        if path_style.lower() in words:
            return negated
    raise OSError(errno.EINVAL, f"path_style is {path_style}: write path_style=true or path_style=false", url)


def _check_path(scheme: str, url: str) -> None:
    """EINVAL for a URL that its parser would change, or that names no place: the store would be elsewhere."""
    path = url.partition("://")[2]
    if scheme == "file" and not path.startswith("/"):
        raise OSError(errno.EINVAL, "a store in a directory needs its absolute path: write file:///DIRECTORY", url)
    if scheme != "file" and not path.partition("/")[0]:
        raise OSError(errno.EINVAL, f"the URL has no bucket: write {scheme}://BUCKET/PREFIX", url)
    if re.search(r"[?#%\\]", path):
        raise OSError(errno.EINVAL, "the path of a store cannot have ?, #, % or \\: choose another one", url)
    if scheme != "file" and "@" in path.partition("/")[0]:
        raise OSError(errno.EINVAL, "a URL has no credentials: set them in the environment", scheme + "://")
    if {".", ".."}.intersection(path.split("/")) or (scheme != "file" and "" in path.rstrip("/").split("/")[1:]):
        raise OSError(errno.EINVAL, "the path of a store cannot have empty parts, . or ..: correct it", url)


def _check_directory(url: str, *, makes_directory: bool) -> None:
    """FileNotFoundError if there is no directory, unless it is to be made; ENOTEMPTY if it has other files."""
    try:
        names = os.listdir(url.removeprefix("file://"))
    except FileNotFoundError:
        if not makes_directory:
            raise FileNotFoundError(errno.ENOENT, "no snapshot store here; `vfsd push` makes one", url) from None
        return
    except OSError as error:
        raise OSError(error.errno, f"cannot open the store: {os.strerror(error.errno or 0)}", url) from None
    if set(names) - {"lost+found"} and not _NAMES_OF_A_STORE.intersection(names):
        raise OSError(
            errno.ENOTEMPTY, "the directory has files and is not a store: choose an empty one, or a new one", url
        )


def _check_endpoint(url: str, options: Mapping[str, str]) -> None:
    """Raise EINVAL if an endpoint is not a URL: obstore would panic at the first request."""
    known = {**{name: os.environ[name] for name in os.environ if name.startswith(("AWS_", "AZURE_"))}, **options}
    for name, value in known.items():
        if _ENDPOINT.fullmatch(name.lower()) and value and not re.match(r"https?://[^/\s]+(/|$)", value):
            raise OSError(errno.EINVAL, f"{name} is {value}, which is not http://HOST:PORT or https://HOST", url)


class ObstoreStorage:
    """Implements `Storage`.  `store`: None opens it later."""

    def __init__(
        self, url: str, store: ObjectStore | None, opening: Callable[[], ObjectStore], patience_s: float,
        refused_s: float, silence_s: float, waiting: Waiting,
    ) -> None:  # fmt: skip
        self.url = url
        self.received_bytes = 0  # of objects
        self._opened = store
        self._opening = opening
        self._opening_lock = threading.Lock()
        self._patience_s = patience_s
        self._refused_s = refused_s
        self._silence_s = silence_s
        self._waiting: Waiting | None = waiting
        self._is_known = False  # whether the server has answered anything; on the loop, as the next
        self._bounds: set[asyncio.Timeout] = set()  # of attempts, while the server is unknown
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Semaphore(_PARALLEL)
        self._thread = threading.Thread(target=self._loop.run_forever, name="vfsd-objects", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _begin(self, key: str, attempt: Callable[[ObjectStore], Awaitable[T]]) -> Future[T]:
        with self._opening_lock:
            store = self._opened = self._opened or self._opening()
        return asyncio.run_coroutine_threadsafe(self._retried(key, lambda: attempt(store)), self._loop)

    def create(self, key: str, data: bytes) -> Future[bool]:
        import obstore  # noqa: PLC0415 an optional dependency
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

        async def attempt(store: ObjectStore) -> bool:
            try:
                await obstore.put_async(store, key, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                # Perhaps it was this create, whose first answer was lost.
                try:
                    return await self._read(store, key) == data
                except FileNotFoundError:
                    raise ConnectionError("the object is being created or deleted") from None
            return True

        return self._begin(key, attempt)

    def read(self, key: str) -> Future[bytes]:
        return self._begin(key, lambda store: self._read(store, key))

    def read_range(self, key: str, start: int, length: int) -> Future[bytes]:
        import obstore  # noqa: PLC0415 an optional dependency

        async def attempt(store: ObjectStore) -> bytes:
            data = bytes(await obstore.get_range_async(store, key, start=start, length=length))
            return self._received(data, length)

        return self._begin(key, attempt)

    async def _read(self, store: ObjectStore, key: str) -> bytes:
        import obstore  # noqa: PLC0415 an optional dependency

        found = await obstore.get_async(store, key)
        return self._received(bytes(await found.bytes_async()), found.meta["size"])

    def _received(self, data: bytes, size: int) -> bytes:
        if len(data) != size:
            raise ConnectionError("the answer is shorter than it has to be")
        self.received_bytes += size
        return data

    def list(self, prefix: str) -> Future[Objects]:
        import obstore  # noqa: PLC0415 an optional dependency

        async def attempt(store: ObjectStore) -> Objects:
            found = [
                ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
                async for batch in obstore.list(store, prefix)
                for meta in batch
            ]
            return sorted(found, key=lambda info: info.key)

        return self._begin(prefix, attempt)

    def delete(self, key: str) -> Future[None]:
        import obstore  # noqa: PLC0415 an optional dependency

        async def attempt(store: ObjectStore) -> None:
            with contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(store, key)

        return self._begin(key, attempt)

    async def _retried(self, key: str, attempt: Callable[[], Awaitable[T]]) -> T:
        began = time.monotonic()
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                async with self._gate:
                    return await self._attempted(attempt, began)
            except Exception as error:  # noqa: BLE001 (as above)
                final = final_error(self.url, key, error)
                if final is not None:
                    raise final from None
                cause = cause_of(error)
                is_refused = not self._is_known and is_unreachable(error)
            passed_s = time.monotonic() - began
            left_s = (self._refused_s if is_refused else self._patience_s) - passed_s
            if delay_s >= left_s:
                raise self._gave_up(cause, is_refused=is_refused)
            if passed_s >= self._silence_s:
                self._say_waiting(cause, left_s)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311 (jitter)
            delay_s = min(delay_s * 2, _LONGEST_DELAY_S)

    def _gave_up(self, cause: str, *, is_refused: bool) -> OSError:
        if is_refused:
            what = f"the object store cannot be reached ({cause}): check its endpoint, and the network"
            return OSError(errno.EHOSTUNREACH, what, self.url)
        return OSError(
            errno.ETIMEDOUT, f"the object store does not answer ({cause}): repeat the command later", self.url
        )

    def _say_waiting(self, cause: str, left_s: float) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting(cause, left_s)

    async def _attempted(self, attempt: Callable[[], Awaitable[T]], began: float) -> T:
        """Make an attempt; as long as the server is unknown, with a bound."""
        if self._is_known:
            return await attempt()
        left_s = max(0.0, began + self._patience_s - time.monotonic())
        loop = asyncio.get_running_loop()
        saying = loop.call_later(self._silence_s, self._say_waiting, "no answer yet", left_s - self._silence_s)
        try:
            async with asyncio.timeout(left_s) as bound:
                self._bounds.add(bound)
                try:
                    found = await attempt()
                finally:
                    self._bounds.discard(bound)
            self._know()
        except Exception as error:
            if has_answered(error):
                self._know()
            raise
        else:
            return found
        finally:
            saying.cancel()

    def _know(self) -> None:
        """The server has answered: attempts that are running need no bound any more."""
        self._is_known = True
        for bound in self._bounds:
            bound.reschedule(None)


# -- failures --------------------------------------------------------------------------------------
_CREDENTIALS: Final = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_REGION)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_CREDENTIALS: Final = re.compile(
    r"credential|169\.254\.169\.254|metadata\.google|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken",
    re.IGNORECASE,
)
_NO_HTTP: Final = re.compile(r"builder error|URL scheme is not allowed|is not https|future panicked", re.IGNORECASE)
_NO_BUCKET: Final = re.compile(r"NoSuchBucket|bucket does not exist|ContainerNotFound", re.IGNORECASE)
_REASONS: Final = (
    (
        re.compile(r"incorrectly configured region|AuthorizationHeaderMalformed|PermanentRedirect"),
        (errno.EINVAL, "the bucket is in another region: set AWS_REGION, or --store-option region="),
    ),
    (
        re.compile("RequestTimeTooSkewed"),
        (errno.EACCES, "the clock of this machine differs from that of the store: correct it"),
    ),
    (
        re.compile(rf"KeyTooLong|\(os error {errno.ENAMETOOLONG}\)"),
        (errno.ENAMETOOLONG, "the name is too long for this store: choose a shorter one"),
    ),
)
_STATUS: Final = re.compile(r"status code: (\d{3}) ([A-Z][A-Za-z ]*)")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
# The names of objects in an error, which must not be taken for its reason: keys may have any name.
_KEYS: Final = re.compile(r"(?<=://)([^/\s]+)/\S*|(?<=for path )\S+|(?<=at location )\S+|(?<=path: )\S+")
_ERRNO: Final = re.compile(r"\(os error (\d+)\)")  # how a store in a directory reports a failed system call
_FINAL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR})
# Answers that may differ when the request is repeated: too slow, concurrent changes, too early, too many requests.
_PASSING_STATUS: Final = frozenset({"408", "409", "412", "425", "429"})
_SLOW: Final = "RequestTimeout"  # S3 answers this with status 400
_FINAL_STATUS: Final = frozenset({"501", "505"})
# No server was reached.
_UNREACHABLE: Final = (
    (re.compile("ConnectionRefused|Connection refused"), "connection refused"),
    (re.compile("dns error"), "the host is unknown"),
    (re.compile("NetworkUnreachable|HostUnreachable|Network is unreachable|No route to host"), "no route to the host"),
    (re.compile("invalid peer certificate|certificate"), "the certificate is not trusted"),
)
_NO_ANSWER: Final = (
    *_UNREACHABLE,
    (re.compile("TimedOut|timed out|Timeout"), "time-out"),
    (re.compile("ConnectionReset|Connection reset|IncompleteMessage"), "the connection was lost"),
)


def final_error(url: str, key: str, error: Exception) -> OSError | None:
    """Return the error for a failed request for `key` of the store at `url`; None if it is worth another try."""
    import obstore.exceptions as known  # noqa: PLC0415 an optional dependency

    text = _KEYS.sub(r"\1", str(error))
    if _NO_BUCKET.search(text):
        return OSError(errno.ENOENT, "there is no such bucket: create it, or correct the name", url)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, "no such object", f"{url}/{key}")
    for pattern, failure in _REASONS:
        if pattern.search(text):
            return OSError(*failure, url)
    status, reason = _status(text)
    if isinstance(error, known.UnauthenticatedError) or status == "401" or _NO_CREDENTIALS.search(text):
        advice = _CREDENTIALS.get(url.partition("://")[0], "set them in the environment")
        return OSError(errno.EACCES, f"no credentials that the store accepts: {advice}", url)
    if isinstance(error, (known.PermissionDeniedError, PermissionError)) or status == "403":
        return OSError(errno.EACCES, "access denied: the credentials do not permit this", url)
    if _NO_HTTP.search(text):
        advice = "cannot use this endpoint: check its URL; one without TLS needs --store-option allow_http=true"
        return OSError(errno.EINVAL, advice, url)
    if isinstance(error, (known.InvalidPathError, known.NotSupportedError, known.UnknownConfigurationKeyError)):
        return OSError(errno.EINVAL, f"the store refuses the request ({first_line(error)})", url)
    if status in _FINAL_STATUS or (status.startswith("4") and status not in _PASSING_STATUS and reason != _SLOW):
        what = f"{reason or 'status'} {status}".strip()
        return OSError(errno.EINVAL, f"the store refuses the request ({what}): check its URL and endpoint", url)
    number = error.errno if isinstance(error, OSError) else None
    found = _ERRNO.search(text)
    if found is not None:
        number = int(found[1])
    if number in _FINAL_ERRNOS:
        return OSError(number, os.strerror(number), url)
    return None


def _status(text: str) -> tuple[str, str]:
    """The status of the server's answer, and its code in words; empty if there was no answer."""
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is None:
        return "", ""
    return status[1], code[1] if code is not None else status[2].strip()


def cause_of(error: Exception) -> str:
    """Why a request failed, in a few words."""
    if isinstance(error, TimeoutError):
        return "time-out"
    text = _KEYS.sub(r"\1", str(error))
    status, reason = _status(text)
    if status:
        return f"{status} {reason}"
    host = re.search(r"https?://[^/\s,]+", text)
    cause = _found(_NO_ANSWER, text)
    if cause is None:
        return first_line(error).rpartition(" - ")[2]
    return f"{host[0]}: {cause}" if host is not None else cause


def is_unreachable(error: Exception) -> bool:
    """Whether a request failed because there was no connection to a server that is trusted."""
    return _found(_UNREACHABLE, _KEYS.sub(r"\1", str(error))) is not None


def has_answered(error: Exception) -> bool:
    """Whether a request failed with an answer of the server."""
    text = _KEYS.sub(r"\1", str(error))
    return bool(_status(text)[0]) or not (isinstance(error, TimeoutError) or _found(_NO_ANSWER, text))


def _found(causes: Sequence[tuple[re.Pattern[str], str]], text: str) -> str | None:
    return next((cause for pattern, cause in causes if pattern.search(text)), None)


def first_line(error: Exception) -> str:
    """The first line of a message of `obstore`, which continues with internal details."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
