"""Names of container images: [HOST[:PORT]/]PATH[:TAG][@DIGEST]. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elasticcb.errors import UsageError

DOCKER_HUB = "docker.io"

# The grammar of registries (github.com/distribution/reference).
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-f:]+\])(?::\d+)?", re.ASCII)
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REST = re.compile(
    rf"(?P<path>{_PART}(?:/{_PART})*)(?::(?P<tag>\w[\w.-]{{0,127}}))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?", re.ASCII
)


@dataclass(frozen=True)
class ImageName:
    """The parts of an image's name; "" for missing ones."""

    host: str
    path: str
    tag: str = ""
    digest: str = ""

    @property
    def full(self) -> str:
        """The name that means the same image to all engines: podman would take `me/zoo` for a local image."""
        host = self.host or (DOCKER_HUB if "/" in self.path else "")
        return (f"{host}/" if host else "") + self.path + (f":{self.tag}" if self.tag else "")

    @property
    def registry(self) -> str:
        return self.host or DOCKER_HUB

    def at(self, digest: str) -> str:
        """The name that pins the content, by digest."""
        return ImageName(self.host, self.path).full + f"@{digest}"


def is_digest(text: str) -> bool:
    return bool(re.fullmatch(r"sha256:[0-9a-f]{64}", text))


def parse_image(text: str) -> ImageName | None:
    """The parts of a name; None if the text is not a name."""
    first, slash, rest = text.partition("/")
    # otherwise it is a namespace of Docker Hub
    host = first if slash and re.search(r"[.:A-Z]|^localhost$", first) else ""
    match = _REST.fullmatch(rest if host else text)
    if match is None or (host and not _HOST.fullmatch(host)):
        return None
    return ImageName(host, match["path"], match["tag"] or "", match["digest"] or "")


def check_image(text: str, flag: str, example: str) -> ImageName:
    """The parts of the value of `flag`.

    Raises:
        UsageError: it is not the name of an image.
    """
    name = parse_image(text)
    if name is not None:
        return name
    problem = "is not the name of an image"
    if "://" in text:
        problem += ", but a URL"
    elif text.lower() != text and parse_image(text.lower()) is not None:
        problem += ": use lowercase letters"
    raise UsageError(f"{flag}={text} {problem}. Expected a name such as {example}.")
