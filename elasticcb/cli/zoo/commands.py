"""`elasticcb zoo`: a new model zoo, and the container image of one, for jobs on Kubernetes."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import tempfile
from pathlib import Path

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.cli.image.advice import build_advice, push_advice
from elasticcb.cli.image.engine import NAMES, Engine, digest_in
from elasticcb.cli.image.name import ImageName, check_image, is_digest, parse_image
from elasticcb.cli.image.process import EngineOutcome, engines, said, show, succeeds
from elasticcb.cli.table_lines import format_bytes
from elasticcb.cli.zoo.files import (
    DOCKERFILE,
    DOCKERIGNORE,
    DOCKERIGNORE_TEXT,
    LOCK,
    REQUIREMENTS,
    REQUIREMENTS_TEXT,
    WHEELS,
    ZOO_IN_IMAGE,
    ZooImage,
    check_lock,
    check_requirements,
    check_wheels,
    check_zoo,
    default_base_image,
    large_entries,
    lock_command,
    package_of,
    secret_files,
    unpinned_bases,
    unpublished_source,
)
from elasticcb.errors import ImageError, UsageError

_TEMPLATES = Path(__file__).parent / "templates"
# Packages that the files of each kit import and elasticcb does not install.
_IMPORTS = {"recommender": ("keras_rs",)}
KITS = tuple(_IMPORTS)


@click.command(context_settings=CONTEXT)
@click.argument("kit", type=click.Choice(KITS), metavar="KIT")
@click.argument("folder", metavar="[FOLDER]", default="")
def new(kit: str, folder: str) -> None:
    """Create a folder with model files, job files, data and a serving example, to start a project from.

    KIT is recommender: two-tower retrieval and ranking, on film ratings. FOLDER is named after the kit by default.
    Existing files are not replaced.

    \b
    Examples:
      elasticcb zoo new recommender
      elasticcb zoo new recommender films
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
_SHOWN_LINES = 5  # last lines of a failed engine; the rest was shown above

_folder_argument = click.argument("folder", metavar="[DIR]", default=".")
_engine_option = click.option(
    "--engine", type=click.Choice(NAMES), help="Container engine; by default the first of these that works."
)
_engine_flags_option = click.option(
    "--engine_flags",
    metavar="FLAGS",
    default="",
    help='Additional flags for the engine, such as "--no-cache --platform=linux/amd64".',
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


@zoo.command(context_settings=CONTEXT)
@_folder_argument
@click.option(
    "--base_image",
    metavar="IMAGE",
    default=default_base_image,
    show_default="the official image of this Python version",
    help="Base image, with Python 3.10 to 3.13 and pip.",
)
@click.option("--extra_pypi_index", metavar="URL", default="", help="Additional package index for pip.")
@click.option(
    "--local_pkg_dir", metavar="FOLDER", help="Folder with your own wheels (*.whl), all of which are installed."
)
@click.option("--force", is_flag=True, help="Replace an existing Dockerfile.")
def init(folder: str, base_image: str, extra_pypi_index: str, local_pkg_dir: str | None, force: bool) -> None:
    """Write the Dockerfile of a model zoo.

    DIR is the folder with your model files; by default the working directory. List the packages that models import
    besides elasticcb in its requirements.txt. Wheels in --local_pkg_dir are copied to its folder `wheels`. If there is
    a requirements.lock, exactly its packages are installed, by version and hash.

    \b
    Examples:
      elasticcb zoo init model_zoo
      elasticcb zoo init model_zoo --base_image=python:3.12-slim --local_pkg_dir=dist
    """
    directory = Path(folder)
    check_zoo(directory)
    requirements = directory / REQUIREMENTS
    if requirements.exists():
        check_requirements(_read(requirements), str(requirements))
    wheels = _wheels(directory, local_pkg_dir)
    lock = directory / LOCK
    if lock.exists():
        check_lock(_read(lock), str(lock), bool(wheels), extra_pypi_index)
    text = ZooImage(base_image, extra_pypi_index, bool(wheels), lock.exists()).dockerfile()
    dockerfile = directory / DOCKERFILE
    if dockerfile.exists() and not force and _read(dockerfile) != text:
        raise UsageError(
            f"{dockerfile} already exists and differs from what these flags generate. Nothing was written. Use "
            "--force to replace it."
        )
    try:
        for wheel in wheels:
            if wheel.parent.resolve() != (directory / WHEELS).resolve():
                (directory / WHEELS).mkdir(exist_ok=True)
                shutil.copy2(wheel, directory / WHEELS)
        dockerfile.write_text(text, encoding="utf-8")
        print(f"Written: {dockerfile}")
        for path, content in ((directory / DOCKERIGNORE, DOCKERIGNORE_TEXT), (requirements, REQUIREMENTS_TEXT)):
            if not path.exists():
                path.write_text(content, encoding="utf-8")
                print(f"Written: {path}")
    except OSError as error:
        raise UsageError(f"{error.filename or directory} can't be written: {error.strerror}.") from None
    source = unpublished_source()
    if source and "elasticcb" not in base_image and "elasticcb" not in map(package_of, wheels):
        other = "" if base_image == default_base_image() else f" --base_image={base_image}"
        print(
            "\n"
            f"This elasticcb was installed from {source}. If no package index has it, build a wheel for the image:\n"
            f"  pip wheel --no-deps --wheel-dir=wheels {shlex.quote(source)}\n"
            f"  elasticcb zoo init {shlex.quote(folder)} --force{other} --local_pkg_dir=wheels"
        )
    if not lock.exists():
        print(
            "\n"
            "To get the same packages in every image, lock their versions and hashes, then write the Dockerfile "
            "again:\n"
            f"  cd {shlex.quote(folder)} && {lock_command(bool(wheels), extra_pypi_index)}\n"
            "  elasticcb zoo init --force …"
        )
    print(f"\nNext: elasticcb zoo build {shlex.quote(folder)} --image={_EXAMPLE}")


def _wheels(directory: Path, local_pkg_dir: str | None) -> list[Path]:
    """The wheels to install: those of the flag, and those already in the zoo."""
    kept = list((directory / WHEELS).glob("*.whl"))
    if local_pkg_dir is None:
        return kept
    source = Path(local_pkg_dir)
    if not source.is_dir():
        raise UsageError(f"--local_pkg_dir={local_pkg_dir} is not a folder. Expected a folder with wheels (*.whl).")
    given = {wheel.name: wheel for wheel in sorted(source.glob("*.whl"))}
    check_wheels(given.values())
    check_wheels([*given.values(), *(wheel for wheel in kept if wheel.name not in given)])
    return list(given.values())


@zoo.command(context_settings=CONTEXT)
@_folder_argument
@click.option("--image", metavar="IMAGE", required=True, help=f"Name of the image, such as {_EXAMPLE}.")
@_engine_option
@_engine_flags_option
def build(folder: str, image: str, engine: str | None, engine_flags: str) -> None:
    """Build the image of a model zoo with docker, podman or buildah.

    DIR is a folder with the Dockerfile of `elasticcb zoo init`; by default the working directory.

    \b
    Examples:
      elasticcb zoo build model_zoo --image=registry.example.org/team/zoo:1
      elasticcb zoo build model_zoo --image=zoo:1 --engine=podman --engine_flags=--platform=linux/amd64
    """
    directory = Path(folder)
    name = _image_to_make(image)
    flags = _split(engine_flags)
    check_zoo(directory)
    dockerfile = directory / DOCKERFILE
    if not dockerfile.exists():
        raise UsageError(
            f"There is no Dockerfile in {folder}. Create it with `elasticcb zoo init {shlex.quote(folder)}`."
        )
    requirements = directory / REQUIREMENTS
    if requirements.exists():
        check_requirements(_read(requirements), str(requirements))
    recipe, lock = _read(dockerfile), directory / LOCK
    if lock.exists() and LOCK not in recipe:
        print(
            f"Warning: {lock} exists, but {dockerfile} does not use it. Write one that does with `elasticcb zoo init "
            f"{shlex.quote(folder)} --force`."
        )
    chosen = engines(engine or "")[0]
    ignored = directory / DOCKERIGNORE
    left_out = _read(ignored) if ignored.exists() else ""
    for file in secret_files(directory, left_out):
        print(
            f"Warning: {directory / file} may contain secrets and is copied into the image, where everyone who pulls "
            f"it can read it. To exclude it, add the line `{file}` at the end of {ignored}. Pass secrets to pods with "
            "--env_from_secret."
        )
    for entry, size in large_entries(directory, left_out):
        print(
            f"Note: {directory / entry}, {format_bytes(size)}, is copied into the image. If pods read it from a "
            f"volume or a URL, add the line `{entry}` to {ignored}."
        )
    command = chosen.build(directory, dockerfile, name, flags)
    print(f"$ {shlex.join(command)}", flush=True)
    outcome = show(command)
    if outcome.code:
        advice = build_advice(outcome.lines, chosen.name, folder)
        raise ImageError(_failure(f"The image {name.full} was not built", chosen, outcome, advice))
    amount = said(chosen.size(name))
    print(f"\nBuilt: {name.full}" + (f" ({amount})" if amount else ""))
    for base in unpinned_bases(recipe):
        print(_unpinned(base, chosen, dockerfile))
    if _has_registry(name):
        print(f"Next: elasticcb zoo push {name.full}")
    else:
        print(
            f"The image is only on this machine. For kind, load it with `kind load docker-image {name.full}`. To push "
            f"it, build it under a name with a registry, such as {_EXAMPLE}."
        )


@zoo.command(context_settings=CONTEXT)
@click.argument("image", metavar="IMAGE")
@_engine_option
@_engine_flags_option
def push(image: str, engine: str | None, engine_flags: str) -> None:
    """Push an image to its registry.

    The registry is the first part of the image's name; for NAME/NAME it is Docker Hub.

    \b
    Examples:
      elasticcb zoo push registry.example.org/team/zoo:1
      elasticcb zoo push localhost:5000/zoo:1 --engine_flags=--tls-verify=false
    """
    name = _image_to_make(image, "IMAGE")
    flags = _split(engine_flags)
    if not _has_registry(name):
        raise UsageError(
            f"{image} contains no registry to push to. Expected a name such as {_EXAMPLE}. Build the image under such "
            f"a name: elasticcb zoo build DIR --image=REGISTRY/{image}"
        )
    there = engines(engine or "")
    chosen = next((each for each in there if succeeds(each.has(name))), None)
    if chosen is None:
        raise UsageError(
            f"There is no image {name.full} here ({', '.join(each.name for each in there)}). To build it: "
            f"elasticcb zoo build DIR --image={name.full}"
        )
    with tempfile.TemporaryDirectory() as folder:
        digest_file = Path(folder) / "digest"
        command = chosen.push(name, digest_file, flags)
        print(f"$ {shlex.join(command)}", flush=True)
        outcome = show(command)
        digest = digest_file.read_text().strip() if digest_file.exists() else digest_in(outcome.lines)
    if outcome.code:
        advice = push_advice(outcome.lines, chosen.name, name.registry)
        raise ImageError(_failure(f"The image {name.full} was not pushed", chosen, outcome, advice))
    print(f"\nPushed: {name.full}")
    if digest:
        print(f"Digest: {digest}. To use exactly this image, even if its tag moves: --image={name.at(digest)}")
    print(
        f"Next: elasticcb train --cluster=kubernetes --namespace=… --service_account=elasticcb --image={name.full} "
        f"--model_zoo={ZOO_IN_IMAGE} --model_def=… --training_data=…"
    )


def _unpinned(base: str, engine: Engine, dockerfile: Path) -> str:
    """Advice about a base image without a digest."""
    name = parse_image(base)
    command = engine.digest(base)
    digest = said(command)
    pinned = name.at(digest if is_digest(digest) else "sha256:…") if name is not None else f"{base}@sha256:…"
    how = "" if is_digest(digest) else f" Its digest: {shlex.join(command)}"
    return (
        f"Warning: {dockerfile} names its base image by a tag, {base}, which may point to another image later. To pin "
        f"it, write FROM {pinned}; `elasticcb zoo init --base_image` accepts it as well.{how}"
    )


def _image_to_make(image: str, flag: str = "--image") -> ImageName:
    name = check_image(image, flag, _EXAMPLE)
    if name.digest:
        raise UsageError(
            f"{flag}={image} has a digest, which only the registry can assign. Expected a tag, as in {_EXAMPLE}."
        )
    return name


def _has_registry(name: ImageName) -> bool:
    return bool(name.host or "/" in name.path)


def _split(engine_flags: str) -> list[str]:
    try:
        return shlex.split(engine_flags)
    except ValueError as error:
        raise UsageError(f"--engine_flags={engine_flags} can't be parsed: {error}.") from None


def _failure(what: str, engine: Engine, outcome: EngineOutcome, advice: str) -> str:
    lines = [line for line in outcome.lines if line.strip()][-_SHOWN_LINES:]
    said_last = "\n".join(f"  {line}" for line in lines)
    text = f"{what}: {engine.name} ended with the exit code {outcome.code}."
    text += f" Its last output:\n{said_last}" if lines else " It printed nothing."
    return text + (f"\n{advice}" if advice else "")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not valid UTF-8"
        raise UsageError(f"{path} can't be read: {reason}.") from None
