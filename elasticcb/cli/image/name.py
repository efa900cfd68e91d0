"""Names of container images: [HOST[:PORT]/]PATH[:TAG][@DIGEST]. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elasticcb.errors import UsageError

DOCKER_HUB = "docker.io"

# As the registries' own grammar has it (github.com/distribution/reference).
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-f:]+\])(?::\d+)?", re.ASCII)
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REST = re.compile(
    rf"(?P<path>{_PART}(?:/{_PART})*)(?::(?P<tag>\w[\w.-]{{0,127}}))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?", re.ASCII
)


@dataclass(frozen=True)
class ImageName:
    """An image's name in its parts; "" where it has none."""

    host: str
    path: str
    tag: str = ""
    digest: str = ""

    @property
    def full(self) -> str:
        """The name in which all engines see the same image: podman would take `me/zoo` for one of this machine."""
        host = self.host or (DOCKER_HUB if "/" in self.path else "")
        return (f"{host}/" if host else "") + self.path + (f":{self.tag}" if self.tag else "")

    @property
    def registry(self) -> str:
        return self.host or DOCKER_HUB

    def at(self, digest: str) -> str:
        """The name of exactly this content."""
        return ImageName(self.host, self.path).full + f"@{digest}"


def is_digest(text: str) -> bool:
    return bool(re.fullmatch(r"sha256:[0-9a-f]{64}", text))


def parse_image(text: str) -> ImageName | None:
    """The parts of a name; None when it is none."""
    first, slash, rest = text.partition("/")
    host = first if slash and re.search(r"[.:A-Z]|^localhost$", first) else ""  # else it is a folder of Docker Hub
    match = _REST.fullmatch(rest if host else text)
    if match is None or (host and not _HOST.fullmatch(host)):
        return None
    return ImageName(host, match["path"], match["tag"] or "", match["digest"] or "")


def check_image(text: str, flag: str, example: str) -> ImageName:
    """The parts of what was given for `flag`.

    Raises:
        UsageError: it is no name of an image.
    """
    name = parse_image(text)
    if name is not None:
        return name
    problem = "is no name of an image"
    if "://" in text:
        problem += ", but a URL"
    elif text.lower() != text and parse_image(text.lower()) is not None:
        problem += ": names are of small letters"
    raise UsageError(f"{flag}={text} {problem}. Expected a name such as {example}.")
