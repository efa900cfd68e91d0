"""The Dockerfile of the project: what it copies is there, and its versions are those of the package."""

from __future__ import annotations

import contextlib
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, BUILD = PYPROJECT["project"], PYPROJECT["build-system"]


def arguments() -> dict[str, str]:
    """The build arguments by name; each has one default."""
    found = set(re.findall(r"^ARG (\w+)=(\S+)$", TEXT, re.MULTILINE))
    assert len(found) == len(dict(found))
    return dict(found)


def test_all_that_the_wheel_is_made_from_is_copied_and_nothing_else_reaches_the_build():
    copied = {
        name.rstrip("/")
        for sources in re.findall(r"^COPY (?!--)(.+) \S+$", TEXT, re.MULTILINE)
        for name in sources.split()
    }
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "setup.py", "proto", "elasticcb", PROJECT["readme"], *PROJECT["license-files"]} <= copied


def test_default_tensorflow_python_and_extras_are_supported():
    given = arguments()
    (tensorflow,) = (each for each in map(Requirement, PROJECT["dependencies"]) if each.name == "tensorflow")
    assert given["TENSORFLOW_VERSION"] in tensorflow.specifier
    (python,) = re.findall(r"python:(3\.\d+)-slim$", given["PYTHON_IMAGE"])
    assert python in Requirement(f"python{PROJECT['requires-python']}").specifier
    assert set(given["EXTRAS"].split(",")) <= PROJECT["optional-dependencies"].keys()


def test_every_requirement_has_an_upper_bound_and_takes_what_is_installed():
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    building = [Requirement(each) for each in BUILD["requires"]]  # in an environment of its own
    running = [Requirement(each) for group in groups for each in group]
    for requirement in running + building:
        if requirement.name != PROJECT["name"]:
            assert any(each.operator in ("<", "==") for each in requirement.specifier), str(requirement)
    for requirement in running:
        with contextlib.suppress(PackageNotFoundError):
            assert version(requirement.name) in requirement.specifier, str(requirement)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_locks_have_what_is_required_with_its_hashes(kind):
    given, text = arguments(), (ROOT / "deploy" / "image" / f"{kind}.lock").read_text(encoding="utf-8")
    locked: dict[str, list[str]] = {}
    for name, one, rest in re.findall(
        r"^([\w.-]+)(?:\[[\w,-]+\])?==(\S+)(.*(?:\n    --hash=sha256:.*)+)", text, re.MULTILINE
    ):
        assert "--hash=sha256:" in rest
        locked.setdefault(name.lower(), []).append(one)
    assert len(locked) == len(set(re.findall(r"^([\w.-]+)[=\[]", text, re.MULTILINE)))
    extras = [each for extra in given["EXTRAS"].split(",") for each in PROJECT["optional-dependencies"][extra]]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *extras]):
        name = "tensorflow-cpu" if (kind, requirement.name) == ("cpu", "tensorflow") else requirement.name
        versions = locked[name.lower().replace("_", "-")]
        assert any(each in requirement.specifier for each in versions), f"{requirement}: {versions}; run `make locks`"
    assert locked["tensorflow-cpu" if kind == "cpu" else "tensorflow"] == [given["TENSORFLOW_VERSION"]]


def test_documentation_names_each_build_argument_with_its_default():
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `([A-Z_]+)` \| `([^`]+)` \|", page, re.MULTILINE)) == arguments()


def test_image_runs_as_the_user_of_pods():
    assert TEXT.rindex("\nUSER 1000:1000\n") > TEXT.rindex("\nFROM ")
