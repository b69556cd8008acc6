"""Storage: the operations on an object store, through `obstore`.

Uses only what S3, GCS, Azure and a directory have in common: create an object that does not exist, read a range, list,
delete.  Objects are never overwritten.

Retries: a request that fails for a reason that may pass (429, 5xx, a time-out, a dropped connection, a short body) is
repeated with exponential backoff and jitter until `patience_s` have passed.  A create whose answer was lost is
repeated, too: if the object then exists with the same content, the create succeeded.

Threading: any thread calls the methods; the requests run on an event loop in a thread of their own, at most
`_PARALLEL` at once.  `obstore` has more threads, so a process that uses a `Storage` must not fork.
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
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

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
_PATH_STYLE: Final = "path_style"
_CREDENTIALS: Final = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_REGION)",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_NO_CREDENTIALS: Final = re.compile(r"credential|169\.254\.169\.254|metadata\.google|InvalidAccessKeyId", re.IGNORECASE)
_NO_HTTP: Final = re.compile(r"builder error|URL scheme is not allowed|is not https", re.IGNORECASE)
_NO_BUCKET: Final = re.compile(r"NoSuchBucket|bucket does not exist|ContainerNotFound", re.IGNORECASE)

_ERRNO: Final = re.compile(r"\(os error (\d+)\)")  # how a store in a directory reports a failed system call
_FINAL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOTDIR})


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a listing.  `modified_s` is the store's own time, in seconds since the epoch."""

    key: str
    size_bytes: int
    modified_s: float


Objects: TypeAlias = list[ObjectInfo]


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
    url: str, options: Mapping[str, str] = MappingProxyType({}), *, patience_s: float = _PATIENCE_S
) -> ObstoreStorage:
    """Open the objects below `url`: s3://BUCKET/PREFIX, gs://, az:// or file:///DIRECTORY.

    `options` are those of `obstore`, for the store or the connection; and "path_style", "true" for S3 servers that are
    not reached as BUCKET.HOST.  Credentials come from the environment.

    ImportError without `obstore`; OSError (EINVAL).
    """
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
            config["virtual_hosted_style_request"] = str(value.lower() not in {"true", "1", "yes"}).lower()
        else:
            config[name] = value
    scheme = url.partition("://")[0]
    if scheme not in {"s3", "gs", "az", "file"}:
        advice = "not a store's URL: write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIR"
        raise OSError(errno.EINVAL, advice, url)
    if scheme == "file" and re.search("[?#%]", url):
        # A URL parser would cut the path there, or decode it, and the store would be in another directory.
        raise OSError(errno.EINVAL, "the directory of a store cannot have ?, # or % in its path: rename it", url)
    # Retries are made here, because those of `obstore` do not cover a create.
    arguments: dict[str, Any] = {} if scheme == "file" else {
        "config": config or None, "client_options": client, "retry_config": {"max_retries": 0},
    }  # fmt: skip
    if scheme == "file":
        arguments["mkdir"] = True
    try:
        store = from_url(url, **arguments)
    except Exception as error:  # noqa: BLE001 (those of `obstore` have no other common base)
        raise OSError(errno.EINVAL, f"cannot open the store: {_first_line(error)}", url) from None
    return ObstoreStorage(url, store, patience_s)


class ObstoreStorage:
    """Implements `Storage`."""

    def __init__(self, url: str, store: ObjectStore, patience_s: float) -> None:
        self.url = url
        self._store = store
        self._patience_s = patience_s
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

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def create(self, key: str, data: bytes) -> Future[bool]:
        return self._begin(self._create(key, data))

    def read(self, key: str) -> Future[bytes]:
        return self._begin(self._retried(key, lambda: self._read(key)))

    def read_range(self, key: str, start: int, length: int) -> Future[bytes]:
        async def attempt() -> bytes:
            import obstore  # noqa: PLC0415 an optional dependency

            data = bytes(await obstore.get_range_async(self._store, key, start=start, length=length))
            if len(data) != length:
                raise ConnectionError("the answer is shorter than it has to be")
            return data

        return self._begin(self._retried(key, attempt))

    def list(self, prefix: str) -> Future[Objects]:
        return self._begin(self._retried(prefix, lambda: self._list(prefix)))

    def delete(self, key: str) -> Future[None]:
        async def attempt() -> None:
            import obstore  # noqa: PLC0415 an optional dependency

            with contextlib.suppress(FileNotFoundError):
                await obstore.delete_async(self._store, key)

        return self._begin(self._retried(key, attempt))

    async def _read(self, key: str) -> bytes:
        import obstore  # noqa: PLC0415 an optional dependency

        found = await obstore.get_async(self._store, key)
        data = bytes(await found.bytes_async())
        if len(data) != found.meta["size"]:
            raise ConnectionError("the answer is shorter than it has to be")
        return data

    async def _list(self, prefix: str) -> Objects:
        import obstore  # noqa: PLC0415 an optional dependency

        found = [
            ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())
            async for batch in obstore.list(self._store, prefix)
            for meta in batch
        ]
        return sorted(found, key=lambda info: info.key)

    async def _create(self, key: str, data: bytes) -> bool:
        import obstore  # noqa: PLC0415 an optional dependency
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

        async def attempt() -> bool:
            try:
                await obstore.put_async(self._store, key, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                # Perhaps it was this create, whose first answer was lost.
                try:
                    return await self._read(key) == data
                except FileNotFoundError:
                    raise ConnectionError("the object is being created or deleted") from None
            return True

        return await self._retried(key, attempt)

    async def _retried(self, key: str, attempt: Callable[[], Awaitable[T]]) -> T:
        deadline = time.monotonic() + self._patience_s
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                async with self._gate:
                    return await attempt()
            except Exception as error:  # noqa: BLE001 (as above)
                final = self._final_error(key, error)
                if final is not None:
                    raise final from None
                if time.monotonic() + delay_s >= deadline:
                    what = f"the object store does not answer ({_first_line(error)}): repeat the command later"
                    raise OSError(errno.ETIMEDOUT, what, self.url) from None
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311 (jitter)
            delay_s = min(delay_s * 2, _LONGEST_DELAY_S)

    def _final_error(self, key: str, error: Exception) -> OSError | None:
        """The error for the caller; None for one that may pass."""
        import obstore.exceptions as known  # noqa: PLC0415 an optional dependency

        text = str(error)
        if _NO_BUCKET.search(text):
            return OSError(errno.ENOENT, "there is no such bucket: create it, or correct the name", self.url)
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(errno.ENOENT, "no such object", f"{self.url}/{key}")
        if isinstance(error, known.UnauthenticatedError) or _NO_CREDENTIALS.search(text):
            advice = _CREDENTIALS.get(self.url.partition("://")[0], "set them in the environment")
            return OSError(errno.EACCES, f"no credentials that the store accepts: {advice}", self.url)
        if isinstance(error, (known.PermissionDeniedError, PermissionError)):
            return OSError(errno.EACCES, "access denied: the credentials do not permit this", self.url)
        wrong_use = (known.InvalidPathError, known.NotSupportedError, known.UnknownConfigurationKeyError)
        if _NO_HTTP.search(text):
            advice = "cannot use this endpoint: check its URL; one without TLS needs --store-option allow_http=true"
            return OSError(errno.EINVAL, advice, self.url)
        if isinstance(error, wrong_use):
            return OSError(errno.EINVAL, f"the store refuses the request ({_first_line(error)})", self.url)
        if isinstance(error, OSError) and error.errno in _FINAL_ERRNOS:
            return OSError(error.errno, error.strerror, self.url)
        number = _ERRNO.search(text)
        if number is not None and int(number[1]) in _FINAL_ERRNOS:
            return OSError(int(number[1]), os.strerror(int(number[1])), self.url)
        return None


def _first_line(error: Exception) -> str:
    """The first line of a message of `obstore`, which continues with internal details."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
