"""Container engines (docker, podman, buildah): choice, commands, errors. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticcb.cli.image.name import ImageName
from elasticcb.errors import UsageError


@dataclass(frozen=True)
class Engine:
    """One kind of engine, by its command.

    Args:
        probe: arguments of a command that succeeds if the engine and its daemon work.
        inspect: arguments of a command that succeeds if the image named after them exists.
        digests: arguments of a command that prints the digest of the base image named after them, after a build.
        writes_digest: whether `push` writes the digest to a file; docker prints it in its last line.
    """

    name: str
    probe: tuple[str, ...]
    inspect: tuple[str, ...]
    digests: tuple[str, ...]
    writes_digest: bool

    def build(self, folder: Path, dockerfile: Path, image: ImageName, more: Sequence[str]) -> list[str]:
        return [self.name, "build", f"--tag={image.full}", f"--file={dockerfile}", *more, str(folder)]

    def has(self, image: ImageName) -> list[str]:
        return [self.name, *self.inspect, image.full]

    def digest(self, image: str) -> list[str]:
        return [self.name, *self.digests, image]

    def size(self, image: ImageName) -> list[str]:
        return [self.name, "images", "--format={{.Size}}", image.full]

    def push(self, image: ImageName, digest_file: Path, more: Sequence[str]) -> list[str]:
        digest = [f"--digestfile={digest_file}"] if self.writes_digest else []
        return [self.name, "push", *digest, *more, image.full]


# In the order in which they are tried. docker asks the registry, because no command lists the base images of its
# builds.
ENGINES = (
    Engine(
        "docker",
        ("version", "--format={{.Server.Version}}"),
        ("image", "inspect"),
        ("buildx", "imagetools", "inspect", "--format={{.Manifest.Digest}}"),
        writes_digest=False,
    ),
    Engine(
        "podman",
        ("info", "--format={{.Version.Version}}"),
        ("image", "exists"),
        ("image", "inspect", "--format={{.Digest}}"),
        writes_digest=True,
    ),
    Engine(
        "buildah",
        ("info",),
        ("inspect", "--type=image", "--format={{.FromImage}}"),
        ("inspect", "--type=image", "--format={{.FromImageDigest}}"),
        writes_digest=True,
    ),
)
NAMES = tuple(engine.name for engine in ENGINES)


@dataclass(frozen=True)
class EngineState:
    """Whether an engine works here; `problem` says why not, "" if it does."""

    engine: Engine
    problem: str = ""


NOT_INSTALLED = "it is not installed"


def usable(states: Sequence[EngineState]) -> list[Engine]:
    """The engines that work.

    Raises:
        UsageError: none works; the message says why.
    """
    found = [state.engine for state in states if not state.problem]
    if found:
        return found
    reasons = "\n".join(f"  {state.engine.name}: {state.problem}" for state in states)
    if len(states) == 1:
        problem = states[0].problem + ("" if states[0].problem.endswith("?") else ".")
        raise UsageError(f"--engine={states[0].engine.name} can't be used: {problem} {_remedy(states)}")
    raise UsageError(f"No container engine works here.\n{reasons}\n{_remedy(states)}")


def _remedy(states: Sequence[EngineState]) -> str:
    stopped = next((state.engine for state in states if state.problem != NOT_INSTALLED), None)
    if stopped is None:
        return f"Install one of {', '.join(NAMES)}; podman and buildah need no daemon."
    return f"Fix {stopped.name} (`{stopped.name} {' '.join(stopped.probe)}` must succeed), or install another engine."


def problem_of(engine: Engine, output: str) -> str:
    """Why an engine does not work, from the output of its failed probe."""
    said = [line.strip() for line in output.splitlines() if line.strip()]
    return said[-1].removeprefix("Error: ").rstrip(".") if said else f"`{engine.name} {' '.join(engine.probe)}` failed"


def digest_in(lines: Sequence[str]) -> str:
    """The digest in docker's last line, "1: digest: sha256:… size: 1234"; "" if there is none."""
    found = re.findall(r"\bdigest: (sha256:[0-9a-f]{64})\b", "\n".join(lines))
    return found[-1] if found else ""
