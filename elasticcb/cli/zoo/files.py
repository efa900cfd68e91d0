"""Generates the files of `elasticcb zoo init`: the Dockerfile of a model zoo and others. Writes nothing itself."""

from __future__ import annotations

import functools
import json
import posixpath
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from elasticcb import __version__
from elasticcb.cli.image.name import check_image
from elasticcb.errors import UsageError

DOCKERFILE, DOCKERIGNORE, REQUIREMENTS, WHEELS = "Dockerfile", ".dockerignore", "requirements.txt", "wheels"
LOCK = "requirements.lock"  # all packages of an image, with versions and hashes
ZOO_IN_IMAGE = "/model_zoo"
LARGE_BYTES = 100 * 2**20  # an entry of a zoo that is probably not meant for the image

IGNORED = (".git", ".venv*", "venv", "jobs", "**/__pycache__", "**/.*_cache", "**/.ipynb_checkpoints", "**/*.egg-info")
# Files that may contain secrets, which everyone who pulls the image could read.
SECRETS = (
    ".env", ".env.*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "id_rsa*", "id_ed25519*",
    "id_ecdsa*", ".netrc", ".pypirc", ".pgpass", ".git-credentials", ".ssh", ".aws", ".gnupg", ".kube",
    "*credentials*", "*secret*.json", "*secret*.y*ml", "*service*account*.json", "*.tfstate",
)  # fmt: skip
DOCKERIGNORE_TEXT = "\n".join(
    ["# Files that the image does not need; list data here as well.", DOCKERFILE, DOCKERIGNORE, *IGNORED]
    + ["# Files that may contain secrets."]
    + [f"**/{pattern}" for pattern in SECRETS]
    + [""]
)
REQUIREMENTS_TEXT = "# Python packages that the model files import, besides elasticcb, tensorflow and keras.\n"

_DOCKERFILE_TEXT = """\
# The image of a model zoo, for jobs on Kubernetes. Written by `elasticcb zoo init`; change it as you like.
#   elasticcb zoo build . --image=REGISTRY/NAME:TAG
FROM {base_image}
USER 0

# Packages are installed again only if these files change, not if models change.
COPY {requirements} /requirements/
{copy_wheels}{installs}

COPY --chown=1000:1000 . {zoo}

# The user of all pods, who may write only to /tmp.
USER 1000:1000
ENV HOME=/tmp
"""


_INSTALLED = "/requirements/installed.txt"
_KEEP = f"""
# The additional index may add packages, but not replace these.
RUN python -m pip list --format=freeze > {_INSTALLED}
"""


def _install(arguments: Sequence[str]) -> str:
    return "RUN python -m pip install --no-cache-dir " + " \\\n    ".join(arguments)


@dataclass(frozen=True)
class ZooImage:
    """The contents of a model zoo's image.

    Args:
        base_image: an image with Python 3.10 to 3.13 and pip, or with elasticcb.
        extra_pypi_index: URL of an additional package index; "": none.
        wheels: whether the zoo has a folder `WHEELS`, whose wheels are all installed.
        locked: whether it has a `LOCK`; then nothing else is installed.
    """

    base_image: str
    extra_pypi_index: str = ""
    wheels: bool = False
    locked: bool = False

    def dockerfile(self) -> str:
        """The text of the Dockerfile.

        Raises:
            UsageError: the base image or the index is malformed.
        """
        check_image(self.base_image, "--base_image", default_base_image())
        local = [f"--find-links=/requirements/{WHEELS}"] if self.wheels else []
        own = [*local, f"'elasticcb[kubernetes]=={__version__}'"]
        if self.wheels:
            own.append(f"/requirements/{WHEELS}/*.whl")
        further = []
        if self.extra_pypi_index:
            check_index(self.extra_pypi_index)
            further = [f"--extra-index-url={shlex.quote(self.extra_pypi_index)}"]
        others = [*further, f"-r /requirements/{REQUIREMENTS}"]
        if self.locked:
            installs = _install(["--require-hashes", *local, *further, f"-r /requirements/{LOCK}"])
        elif further:
            installs = _install(own) + _KEEP + _install([f"--constraint={_INSTALLED}", *others])
        else:
            installs = _install([*own, *others])
        return _DOCKERFILE_TEXT.format(
            base_image=self.base_image,
            requirements=LOCK if self.locked else REQUIREMENTS,
            copy_wheels=f"COPY {WHEELS} /requirements/{WHEELS}/\n" if self.wheels else "",
            installs=installs,
            zoo=ZOO_IN_IMAGE,
        )


def default_base_image() -> str:
    """The official image of this Python version, so that wheels built here fit; its full name works with all
    engines."""
    return "docker.io/library/python:{}.{}-slim".format(*sys.version_info)


def lock_command(wheels: bool, extra_pypi_index: str) -> str:
    """The command that creates the `LOCK` of a zoo, in its folder; the arguments are those of `ZooImage`."""
    local = f" --find-links={WHEELS}" if wheels else ""
    local += f" --index={shlex.quote(extra_pypi_index)}" if extra_pypi_index else ""
    version = "{}.{}".format(*sys.version_info)
    return (
        f"echo 'elasticcb[kubernetes]=={__version__}' | uv pip compile --generate-hashes --python-version={version}"
        f"{local} --output-file={LOCK} - {REQUIREMENTS}"
    )


def check_lock(text: str, place: str, wheels: bool, extra_pypi_index: str) -> None:
    """Raises `UsageError` if a `LOCK` lacks this elasticcb with its hashes."""
    pattern = rf"^elasticcb(\[[^]]*\])?=={re.escape(__version__)}[\s\\]+--hash="
    if not re.search(pattern, text, re.MULTILINE):
        raise UsageError(
            f"{place} does not lock elasticcb {__version__} with hashes, so no image can be built with it. Remove it, "
            "or create it again in its folder:\n"
            f"  {lock_command(wheels, extra_pypi_index)}"
        )


def unpinned_bases(dockerfile: str) -> list[str]:
    """The base images of a Dockerfile that are not pinned by digest."""
    found, stages = [], {"scratch"}
    for image, stage in re.findall(r"(?im)^FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", dockerfile):
        if image.lower() not in stages and not re.search(r"[@$]", image):
            found.append(image)
        stages.add(stage.lower())
    return list(dict.fromkeys(found))


def check_index(url: str) -> None:
    """Raises `UsageError` if `url` is not the URL of an index, or contains a password that the image would reveal."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not re.fullmatch(r"[!-~]+", url):
        raise UsageError(
            f"--extra_pypi_index={url} is not the URL of a package index. Expected a URL such as "
            "https://packages.example.org/simple."
        )
    if parts.username or parts.password:
        raise UsageError(
            f"--extra_pypi_index contains a user or a password of {parts.hostname}, which everyone who pulls the "
            "image could read in its history. Instead, download the packages here with `pip wheel --wheel-dir=wheels "
            "PACKAGE`, and add --local_pkg_dir=wheels."
        )


def check_zoo(folder: Path) -> None:
    """Raises `UsageError` if `folder` contains no model files."""
    if not folder.exists():
        raise UsageError(f"There is no folder {folder}. Expected a model zoo: the folder with your model files.")
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file. Expected a model zoo: the folder with your model files.")
    if next(model_files(folder), None) is None:
        raise UsageError(
            f"{folder} contains no Python files. Expected a model zoo: the folder with your model files, as for "
            "--model_zoo of `elasticcb train`."
        )


def model_files(folder: Path) -> Iterator[Path]:
    """Python files in it and two folders down."""
    for pattern in ("*.py", "*/*.py", "*/*/*.py"):
        yield from folder.glob(pattern)


def check_requirements(text: str, place: str) -> None:
    """Raises `UsageError` that lists all lines of a requirements.txt that can't be installed in an image."""
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition(" #")[0].strip()
        for pattern, why in _NOT_IN_AN_IMAGE:
            if re.search(pattern, line):
                problems.append(f"{place}:{number}: `{line}` {why}")
                break
    if problems:
        raise UsageError("\n".join(problems))


_WHEEL_INSTEAD = (
    "which is not in the image. Remove the line, and put a wheel of the package into --local_pkg_dir instead (`pip "
    "wheel --no-deps --wheel-dir=wheels FOLDER`)."
)
_FILE_INSTEAD = (
    f"but only {REQUIREMENTS} is available when packages are installed. Replace the line by the lines of that file."
)
# `pip freeze` writes the first two for what was installed from a folder.
_NOT_IN_AN_IMAGE = (
    (r"^(-e|--editable)\b|^git\+file:", f"names a folder on this machine, {_WHEEL_INSTEAD}"),
    (r"\bfile:|^\.{0,2}/|^~/", f"names a file on this machine, {_WHEEL_INSTEAD}"),
    (r"^(-r|--requirement|-c|--constraint)\b", f"names another file, {_FILE_INSTEAD}"),
)


def check_wheels(wheels: Iterable[Path]) -> None:
    """Raises `UsageError` if there are no wheels, or two of one package, which pip refuses."""
    by_package: dict[str, Path] = {}
    for wheel in wheels:
        package = package_of(wheel)
        other = by_package.setdefault(package, wheel)
        if other != wheel:
            raise UsageError(
                f"{wheel} and {other} are wheels of the same package. Expected one wheel per package. Remove one of "
                "the two."
            )
    if not by_package:
        raise UsageError(
            "--local_pkg_dir names a folder without wheels (*.whl). Build a wheel from a package's source with `pip "
            "wheel --no-deps --wheel-dir=wheels FOLDER`."
        )


def package_of(wheel: Path) -> str:
    """The normalized name of the package: "My_Models-1.0-py3-none-any.whl" -> "my-models"."""
    return re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()


def unpublished_source() -> str:
    """The folder that this elasticcb was installed from; "" if it was installed from a package index."""
    try:
        text = distribution("elasticcb").read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    url = urlsplit(json.loads(text)["url"]) if text else urlsplit("")
    return url2pathname(url.path) if url.scheme == "file" else ""


def secret_files(folder: Path, dockerignore: str) -> list[str]:
    """Files and folders of a zoo that may contain secrets, by their own name or that of a parent folder, and are not
    excluded: sorted paths in the zoo; a folder stands for all that it contains."""
    found: dict[str, None] = {}
    for path in sorted(each.relative_to(folder) for each in folder.rglob("*")):
        looks_so = any(fnmatch(part.lower(), pattern) for part in path.parts for pattern in SECRETS)
        is_told = any(parent.as_posix() in found for parent in path.parents)
        if looks_so and not is_told and not is_left_out(path.as_posix(), dockerignore):
            found[path.as_posix()] = None
    return sorted(found)


def is_left_out(path: str, dockerignore: str) -> bool:
    """Whether a .dockerignore excludes a path in its folder: the last line that matches the path or a parent decides; a
    line with "!" includes it again."""
    left_out = False
    for line in map(str.strip, dockerignore.splitlines()):
        pattern = line.removeprefix("!").strip().removesuffix("/**")
        if pattern and not line.startswith("#") and re.fullmatch(_expression(pattern), path):
            left_out = not line.startswith("!")
    return left_out


_WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@functools.cache
def _expression(pattern: str) -> str:
    """A regular expression that matches what a .dockerignore pattern names, and everything below it."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", posixpath.normpath(pattern).lstrip("/"))
    return "".join(_WILD.get(each) or re.escape(each) for each in pieces) + "(?:/.*)?"


def large_entries(folder: Path, dockerignore: str, largest: int = LARGE_BYTES) -> Sequence[tuple[str, int]]:
    """Entries of a zoo with more than `largest` bytes that are not excluded by name: (entry, bytes), largest first."""
    sizes = [(entry.name, _bytes_of(entry)) for entry in folder.iterdir() if not is_left_out(entry.name, dockerignore)]
    return sorted(((name, size) for name, size in sizes if size > largest), key=lambda each: -each[1])


def _bytes_of(entry: Path) -> int:
    if entry.is_symlink():
        return 0
    if entry.is_dir():
        return sum(file.lstat().st_size for file in entry.rglob("*") if file.is_file() and not file.is_symlink())
    return entry.lstat().st_size
