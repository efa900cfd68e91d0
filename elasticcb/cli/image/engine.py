"""What builds and pushes container images: docker, podman or buildah. Which one, its commands, its errors. Pure."""

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
        probe: arguments that succeed when it can work, its daemon included.
        inspect: arguments that succeed when it has the image that is named behind them.
        digests: arguments that print the digest of the image that is named behind them, after a build from it.
        writes_digest: whether `push` writes the digest into a file; docker tells it in its last line.
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


# In the order in which they are asked. docker asks the registry: its builds keep base images where no command looks.
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
    """Whether an engine can work here: `problem` is "" when it can, else why not."""

    engine: Engine
    problem: str = ""


NOT_INSTALLED = "it is not installed"


def usable(states: Sequence[EngineState]) -> list[Engine]:
    """The engines that can work.

    Raises:
        UsageError: there is none; says of each why not.
    """
    found = [state.engine for state in states if not state.problem]
    if found:
        return found
    reasons = "\n".join(f"  {state.engine.name}: {state.problem}" for state in states)
    if len(states) == 1:
        problem = states[0].problem + ("" if states[0].problem.endswith("?") else ".")
        raise UsageError(f"--engine={states[0].engine.name} can't be used: {problem} {_remedy(states)}")
    raise UsageError(f"There is nothing here that works with container images.\n{reasons}\n{_remedy(states)}")


def _remedy(states: Sequence[EngineState]) -> str:
    stopped = next((state.engine for state in states if state.problem != NOT_INSTALLED), None)
    if stopped is None:
        return f"Install one of {', '.join(NAMES)}; podman and buildah need no daemon."
    return f"Mend {stopped.name} (`{stopped.name} {' '.join(stopped.probe)}` must succeed), or install another engine."


def problem_of(engine: Engine, output: str) -> str:
    """Why an engine can't work, from what its failed probe said."""
    said = [line.strip() for line in output.splitlines() if line.strip()]
    return said[-1].removeprefix("Error: ").rstrip(".") if said else f"`{engine.name} {' '.join(engine.probe)}` failed"


def digest_in(lines: Sequence[str]) -> str:
    """The digest in docker's last line, "1: digest: sha256:… size: 1234"; "" when there is none."""
    found = re.findall(r"\bdigest: (sha256:[0-9a-f]{64})\b", "\n".join(lines))
    return found[-1] if found else ""
