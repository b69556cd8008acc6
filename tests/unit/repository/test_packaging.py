"""What a distribution of vfsd says of itself, and carries."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

import vfsd

REPOSITORY = Path(__file__).parents[3]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
INSTALLED = PYPROJECT["tool"]["setuptools"]["data-files"]
LINK = re.compile(r"\]\(([^)\s]+)")


def carried() -> dict[Path, Path]:
    """Where each file of the documentation is installed, below share/doc/vfsd, by its place in the repository."""
    return {
        path: Path(directory).relative_to("share/doc/vfsd") / path.name
        for directory, patterns in INSTALLED.items()
        if directory.startswith("share/doc/vfsd")
        for pattern in patterns
        for path in REPOSITORY.glob(pattern)
    }


def test_the_metadata_has_what_an_index_shows() -> None:
    assert PROJECT["license"] == "MIT"
    assert [(REPOSITORY / name).is_file() for name in PROJECT["license-files"]] == [True]
    assert PROJECT["authors"]
    assert PROJECT["keywords"]
    minimum = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {minimum}" in PROJECT["classifiers"]
    # PEP 639: an expression and a classifier of the licence exclude each other.
    assert not [classifier for classifier in PROJECT["classifiers"] if classifier.startswith("License ::")]


def test_the_long_description_has_no_link_that_is_dead_on_an_index_page() -> None:
    links = LINK.findall((REPOSITORY / PROJECT["readme"]).read_text())
    assert [link for link in links if not link.startswith("https://")] == []


def test_the_documentation_and_the_units_are_carried() -> None:
    wanted = {*REPOSITORY.glob("docs/*.md"), REPOSITORY / "README.md"}
    wanted |= {path for path in REPOSITORY.glob("systemd/**/*") if path.is_file()}
    assert wanted - carried().keys() == set()


@pytest.mark.parametrize("document", ["README.md", "docs/README.md", "systemd/README.md", "docs/semantics.md"])
def test_links_between_installed_documents_hold(document: str) -> None:
    installed = carried()
    place = installed[REPOSITORY / document]
    targets = [link.partition("#")[0] for link in LINK.findall((REPOSITORY / document).read_text())]
    missing = [
        target
        for target in targets
        if target and "://" not in target and Path(os.path.normpath(place.parent / target)) not in installed.values()
    ]
    assert missing == []


def test_a_release_finds_the_version_and_the_section_of_the_changelog() -> None:
    assert PROJECT["dynamic"] == ["version"]  # declared once, where scripts/release writes it
    source = (REPOSITORY / "vfsd/__init__.py").read_text()
    assert re.findall(r'^__version__: Final = "(.*)"$', source, re.MULTILINE) == [vfsd.__version__]
    assert (REPOSITORY / "CHANGELOG.md").read_text().count("\n## [Unreleased]\n") == 1


def test_an_installation_needs_no_compiler() -> None:
    names = [re.split(r"[<>=\[ ]", requirement)[0] for requirement in PROJECT["dependencies"]]
    assert "pyfuse3" not in names  # it has no wheels; scripts/release tries that all others have
    assert [name for name in PROJECT["optional-dependencies"]["dev"] if "pyfuse3" in name] == ["vfsd[pyfuse3]"]
