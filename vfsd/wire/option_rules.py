"""The check of a mount's options: each by its declaration in `vfsd.wire.options`, and in combination with the others.

An `OptionError` names options by placeholders, because their names differ between the Python API (`max_bytes`) and the
command line (`--max-bytes`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, get_args, get_origin

import msgspec

from vfsd.wire.options import (
    NAME_PATTERN,
    BackendSpec,
    MountOptions,
    Option,
    declared_options,
    is_engine,
    is_given,
    known_engines,
)

# Sizes and counts in the kernel's interface are signed 64-bit numbers (off_t).
LARGEST: Final = 2**63 - 1
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


def check_options(options: MountOptions) -> None:
    """Raise OptionError for a value that is invalid by itself, or in combination with the other options."""
    values = options.values()
    _check_values(values)
    for name, (_, option) in declared_options().items():
        scope = option.scope
        if scope is not None and is_given(values, name) and not scope.allows(values):
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


def _check_values(values: Mapping[str, Any]) -> None:
    for name, (kind, option) in declared_options().items():
        value = values[name]
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise OptionError(f"{{{name}}} is an empty string")
        if get_origin(kind) is Literal and value not in get_args(kind):
            _refuse_choice(name, value, get_args(kind))
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise TypeError(f"{name} must be {kind_words(kind, option)}, not {type(value).__name__}") from None
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(name, value, option)
    max_bytes, max_memory = values["max_bytes"], values["max_memory"]
    if None not in {max_bytes, max_memory} and max_bytes > max_memory:
        raise OptionError(
            "{max_bytes} must be at most {max_memory}, which bounds content, metadata and snapshots together"
        )
    if NAME_PATTERN.fullmatch(values["name"]) is None:
        raise OptionError(
            "{name} {value!r} is not a workspace name: letters, digits, '.', '_' and '-', at most 64, a letter or"
            " digit first",
            value=values["name"],
        )
    if not is_engine(values["engine"]):
        _refuse_choice("engine", values["engine"], known_engines())
    _check_workdir(values["workdir"])
    for each in values["store_options"]:
        _check_store_option(each)


def kind_words(kind: Any, option: Option) -> str:
    """Describe the values of an option for a user of Python."""
    if option.value:
        return option.value
    if option.kind in {"file", "directory"}:
        return f"path of a {option.kind}"
    if get_origin(kind) is Literal:
        first, *others, last = (f'"{each}"' for each in get_args(kind))
        return f"{', '.join([first, *others])} or {last}"
    if get_origin(kind) is tuple:
        return "list of str" + (f", each {option.metavar}" if option.metavar else "")
    name = next(each for each in get_args(kind) or (kind,)).__name__
    return f"{name}, seconds" if name == "float" else str(name)


def _refuse_choice(name: str, value: str, choices: Sequence[str]) -> NoReturn:
    raise OptionError(f"{{{name}}} must be one of {', '.join(choices)}, not {{value!r}}", value=value)


def _check_number(name: str, value: float, option: Option) -> None:
    if option.zero and value == 0:
        return
    if name.endswith("_s"):
        if not 0 < value < math.inf:
            least = "a number of seconds from 0 on" if option.zero else "a positive number of seconds"
            raise OptionError(f"{{{name}}} must be {least}, not {{value}}", value=value)
    elif not 0 < value <= LARGEST and not option.zero:
        raise OptionError(f"{{{name}}} must be positive and at most 2^63 - 1, not {{value}}", value=value)
    elif not option.least <= value <= LARGEST:
        zero = "0 or " if option.zero else ""
        raise OptionError(f"{{{name}}} must be {zero}at least {{least:,}} bytes", least=option.least)


def _check_store_option(option: str) -> None:
    key, sign, value = option.partition("=")
    if not (key and sign and value):
        raise OptionError("{store_options} {option}: write KEY=VALUE, for example region=eu-west-1", option=option)
    refusal = credential_refusal(option)
    if refusal is not None:  # the options of a daemon are in its record, too
        raise OptionError("{store_options} {refusal}", refusal=refusal)


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
