"""The rules for mount options: valid values, and the backends that each option applies to.

The check, the error messages, `vfsd mount --help` and docs/mount.md use the table `SCOPES`.  An option without a row
applies to every backend.

An `OptionError` names options by placeholders, because their names differ between the Python API (`max_bytes`) and the
command line (`--max-bytes`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from protocol.values import Value
from vfsd.wire.options import (
    BACKENDS,
    CACHES,
    DEFAULTS,
    FSYNCS,
    NAME_PATTERN,
    SNAPSHOT_DIRS,
    TRANSPORTS,
    WAKEUPS,
    BackendSpec,
    MountOptions,
    is_engine,
    known_engines,
)

# Sizes and counts in the kernel's interface are signed 64-bit numbers (off_t).
LARGEST: Final = 2**63 - 1
LEAST_MEMORY_BYTES: Final = 4 << 20  # the minimum of max_memory; a smaller workspace could store hardly anything
LEAST_CACHE_BYTES: Final = 16 << 20  # the minimum of cache_bytes
# Parts of an option's name: what makes its value a secret, except in names of keys that are kept elsewhere.
_SECRET: Final = re.compile(r"secret|token|password|credential|key|(^|[_-])sas([_-]|$)", re.IGNORECASE)
_PASSWORD: Final = re.compile(r"https?://[^/]*@", re.IGNORECASE)
_VARIABLES: Final = {
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
    "token": "AWS_SESSION_TOKEN",
    "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
    "sas_key": "AZURE_STORAGE_SAS_KEY",
    "sas_token": "AZURE_STORAGE_SAS_KEY",
    "client_secret": "AZURE_STORAGE_CLIENT_SECRET",
    "application_credentials": "GOOGLE_APPLICATION_CREDENTIALS",
    "service_account_key": "GOOGLE_SERVICE_ACCOUNT_KEY",
}
_ALL_VARIABLES: Final = "AWS_SECRET_ACCESS_KEY, AZURE_STORAGE_ACCOUNT_KEY or GOOGLE_APPLICATION_CREDENTIALS"
_NO_SECRET: Final = re.compile(r"kms[_-]key[_-]id|bucket[_-]key", re.IGNORECASE)
# The options of a daemon fit in a pipe, and each file that a program meets for the first time is matched in about a
# millisecond.
MOST_PATTERNS: Final = 1000
MOST_PATTERN_BYTES: Final = 32 << 10
_POSITIVE: Final = ("max_bytes", "max_inodes", "max_memory", "pids_limit", "memory_bytes")


class OptionError(ValueError):
    """An option is invalid by itself, or in combination with the others.

    `template` names options as "{max_bytes}"; `values` are inserted unchanged.
    """

    def __init__(self, template: str, **values: object) -> None:
        self._template = template
        self._values = values
        super().__init__(self.message({}))

    def message(self, names: Mapping[str, str]) -> str:
        """Return the message with each option under its name in `names`, or under its own name."""
        return self._template.format_map(_OptionNames({**names, **self._values}))


class _OptionNames(dict[str, object]):
    def __missing__(self, name: str) -> str:
        return name


class Scope(Value):
    """Where an option applies: to one of the `backends`, or together with one of the other `options`.

    `why` is the reason that it does not apply elsewhere.  Every option applies to a backend that is not built in; the
    backend's opener refuses those that it does not support.
    """

    backends: tuple[str, ...]
    why: str
    options: tuple[str, ...] = ()

    def allows(self, values: Mapping[str, Any]) -> bool:
        kind = values["backend"].kind
        if _LAYERS.get(values["backend"].lower_layer) in self.backends:
            return True
        return kind in self.backends or kind not in BACKENDS or any(is_given(values, name) for name in self.options)

    @property
    def places(self) -> str:
        """The backends and options joined by "or", with options as placeholders."""
        names = [BACKENDS.get(kind, kind) for kind in self.backends] + [f"{{{name}}}" for name in self.options]
        return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


_OVER_SNAPSHOT: Final = "overlay:snapshot:NAME"  # this kind of overlay only
_OVER_URL: Final = "overlay:URL#NAME"
_LAYERS: Final[Mapping[str | None, str]] = {"snapshot": _OVER_SNAPSHOT, "remote": _OVER_URL}
_IN_MEMORY: Final = ("memory", "overlay")
_ON_DISK: Final = ("host", "container", "image", "exec")
_LIMITS: Final = Scope(_IN_MEMORY, "the other backends have the limits of their file system")
_FILTER: Final = Scope(("overlay",), "only an overlay filters the directory below it")
_REMOTE: Final = Scope((_OVER_URL,), "nothing else reads from an object store while it is mounted")
_JOURNAL: Final = Scope((), "without it there is no journal", ("persist",))
_NEW_CONTAINER: Final = Scope(("image",), "it is for a container that vfsd creates", ("sandbox",))

SCOPES: Final[Mapping[str, Scope]] = {
    "archive": Scope(_IN_MEMORY, "the other backends have content of their own"),
    "max_bytes": _LIMITS,
    "max_inodes": _LIMITS,
    "max_memory": _LIMITS,
    "persist": Scope(_IN_MEMORY, "the other backends store their content"),
    "journal_dir": _JOURNAL,
    "fsync": _JOURNAL,
    "keeper": Scope(_ON_DISK, "without a journal nothing brings the content back", ("persist",)),
    "cache_timeout_s": Scope(_ON_DISK, "only vfsd changes what is in memory, so it is cached without a time limit"),
    "cache": Scope(_IN_MEMORY, "other programs see the files of the other backends, so a write there must not wait"),
    "store": Scope((*_ON_DISK, _OVER_SNAPSHOT), "the other backends keep snapshots in memory"),
    "store_options": _REMOTE,
    "cache_bytes": _REMOTE,
    "remote_timeout_s": _REMOTE,
    "prefetch": _REMOTE,
    "include": _FILTER,
    "exclude": _FILTER,
    "sandbox": Scope(
        ("memory", "overlay", "host", "exec"), "the commands of a workspace in a container run in that container"
    ),
    "podman_url": Scope(("container", "image"), "nothing else uses Podman", ("sandbox",)),
    "workdir": Scope(("container", "image", "exec"), "it is a directory in a container, or where a command leads"),
    "transport": Scope(("container", "image"), "it is the way to the files of a container"),
    "network": _NEW_CONTAINER,
    "pids_limit": _NEW_CONTAINER,
    "memory_bytes": _NEW_CONTAINER,
    "snapshot_each": Scope(
        ("container", "image"), "without one of them no command runs in the workspace", ("sandbox", "exec_on_host")
    ),
}


def is_secret(option: str) -> bool:
    """Whether the name of an object store's option says that its value is a secret."""
    return _SECRET.search(_NO_SECRET.sub("", option)) is not None


def credential_refusal(option: str) -> str | None:
    """Why KEY=VALUE may not be an option of an object store: ps(1) shows credentials.  None if it has none."""
    key, _, value = option.partition("=")
    if _PASSWORD.match(value):
        return f"{key} has a user or password: credentials come from the environment only, so leave them out"
    if not is_secret(key):
        return None
    plain = re.sub("^(aws|azure_storage|azure|google)_", "", key.lower().replace("-", "_"))
    return f"{key}: credentials come from the environment only: set {_VARIABLES.get(plain, _ALL_VARIABLES)}"


def is_given(values: Mapping[str, Any], name: str) -> bool:
    """Whether the option has a value other than its default."""
    return bool(values[name] != DEFAULTS[name])


def check_options(options: MountOptions) -> None:
    """Raise OptionError for a value that is invalid by itself, or in combination with the other options."""
    values = options.values()
    _check_values(values)
    for name, scope in SCOPES.items():
        if is_given(values, name) and not scope.allows(values):
            template = f"{{{name}}} goes with {scope.places}, not with the backend {{kind}}: {{why}}"
            raise OptionError(template, kind=values["backend"].form, why=scope.why)
    if values["cache"] == "writeback" and values["engine"] not in {"auto", "native"}:
        raise OptionError("{cache} writeback needs {engine} native, not {value}", value=values["engine"])
    if values["prefetch"] and not values["cache_bytes"]:
        raise OptionError("{prefetch} needs {cache_bytes}: it fetches into the cache")
    check_policy_size({name: values[name] for name in ("protect", "hide")})
    if values["audit_file"] is not None and not values["audit"]:
        raise OptionError("{audit_file} and {audit} exclude each other: without the log there is nothing to keep")
    if values["sandbox"] is not None and values["exec_on_host"]:
        raise OptionError(
            "{sandbox} and {exec_on_host} exclude each other: commands run in a container or on this host"
        )


def check_policy_size(patterns: Mapping[str, Sequence[str]]) -> None:
    """Raise OptionError for more patterns, of all options together, than a workspace takes."""
    every = [each for some in patterns.values() for each in some]
    size = sum(len(each.encode("utf-8", "surrogateescape")) for each in every)
    if len(every) > MOST_PATTERNS or size > MOST_PATTERN_BYTES:
        names = " and ".join(f"{{{name}}}" for name, some in patterns.items() if some)
        raise OptionError(
            f"{names}: {{count:,}} patterns of {{size:,}} bytes together are too many, the limit is {{most:,}} patterns"
            " and {bytes:,} bytes",
            count=len(every),
            size=size,
            most=MOST_PATTERNS,
            bytes=MOST_PATTERN_BYTES,
        )


_CHOICES: Final[Mapping[str, Sequence[str]]] = {
    "transport": TRANSPORTS,
    "wakeups": WAKEUPS,
    "snapshot_directory": SNAPSHOT_DIRS,
    "cache": CACHES,
    "fsync": FSYNCS,
}


def _check_values(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise OptionError(f"{{{name}}} is an empty string")
    for name in _POSITIVE:
        value = values[name]
        if value is not None and not 0 < value <= LARGEST:
            raise OptionError(f"{{{name}}} must be positive and at most 2^63 - 1, not {{value}}", value=value)
    _check_memory(values["max_bytes"], values["max_memory"])
    if NAME_PATTERN.fullmatch(values["name"]) is None:
        raise OptionError(
            "{name} {value!r} is not a workspace name: letters, digits, '.', '_' and '-', at most 64, a letter or"
            " digit first",
            value=values["name"],
        )
    if not is_engine(values["engine"]):
        _refuse_choice("engine", values["engine"], known_engines())
    for name, choices in _CHOICES.items():
        if values[name] not in choices:
            _refuse_choice(name, values[name], choices)
    _check_workdir(values["workdir"])
    _check_remote(values)
    timeout_s = values["cache_timeout_s"]
    if timeout_s is not None and not 0 <= timeout_s < math.inf:
        raise OptionError("{cache_timeout_s} must be a number of seconds from 0 on, not {value}", value=timeout_s)


def _refuse_choice(name: str, value: str, choices: Sequence[str]) -> NoReturn:
    raise OptionError(f"{{{name}}} must be one of {', '.join(choices)}, not {{value!r}}", value=value)


def _check_memory(max_bytes: int | None, max_memory: int | None) -> None:
    if max_memory is None:
        return
    if max_memory < LEAST_MEMORY_BYTES:
        raise OptionError("{max_memory} must be at least {least:,} bytes", least=LEAST_MEMORY_BYTES)
    if max_bytes is not None and max_bytes > max_memory:
        raise OptionError(
            "{max_bytes} must be at most {max_memory}, which bounds content, metadata and snapshots together"
        )


def _check_remote(values: Mapping[str, Any]) -> None:
    for option in values["store_options"]:
        key, sign, value = option.partition("=")
        if not (key and sign and value):
            raise OptionError("{store_options} {option}: write KEY=VALUE, for example region=eu-west-1", option=option)
        refusal = credential_refusal(option)
        if refusal is not None:  # the options of a daemon are in its record, too
            raise OptionError("{store_options} {refusal}", refusal=refusal)
    size, timeout_s = values["cache_bytes"], values["remote_timeout_s"]
    if size and not LEAST_CACHE_BYTES <= size <= LARGEST:
        raise OptionError("{cache_bytes} must be 0 or at least {least:,} bytes", least=LEAST_CACHE_BYTES)
    if not 0 < timeout_s < math.inf:
        raise OptionError("{remote_timeout_s} must be a positive number of seconds, not {value}", value=timeout_s)


def _check_workdir(workdir: str | None) -> None:
    if workdir is not None and (not workdir.startswith("/") or ".." in workdir.split("/")):
        raise OptionError(
            "{workdir} must be an absolute path, in the container or at the other end of the command, without '..', not"
            " {value!r}",
            value=workdir,
        )


def parse_sandbox(text: str) -> BackendSpec:
    """Parse the value of the option `sandbox`.  OptionError for anything but image:REF."""
    spec = BackendSpec.split(text)
    if spec.kind != "image" or not spec.argument:
        raise OptionError("{sandbox} must be image:REF, as image:python:3.12, not {value!r}", value=text)
    return spec
