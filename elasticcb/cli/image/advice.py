"""What to do about a container engine that failed, from what it said. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """`words` for the user of an engine whose last lines have `pattern`."""

    pattern: str
    words: str


_UNKNOWN_FLAG = Advice(
    r"unknown (shorthand )?flag",
    "{engine} does not know a flag of --engine_flags; its --help lists those that it has.",
)
# The first one that fits counts.
_BUILD = (
    _UNKNOWN_FLAG,
    Advice(
        r"No matching distribution found for elasticcb",
        "No package index has this elasticcb for the base image's Python. Make a wheel of your checkout, "
        "`pip wheel --no-deps --wheel-dir=wheels CHECKOUT`, then `elasticcb zoo init {folder} --force "
        "--local_pkg_dir=wheels`; or give a --base_image that has it.",
    ),
    Advice(
        r"No matching distribution found for",
        "A package of requirements.txt is on no index for the base image's Python: look at its name and version above. "
        "--extra_pypi_index of `elasticcb zoo init` names another index, --local_pkg_dir gives wheels.",
    ),
    Advice(
        r"python: (command )?not found|executable file .?python.? not found|python\W+ executable file not found|"
        r"No module named pip",
        "The base image has no `python` with pip. Expected one such as python:3.12-slim: "
        "`elasticcb zoo init {folder} --force --base_image=IMAGE`.",
    ),
    Advice(
        r"externally-managed-environment",
        "The base image's Python belongs to its distribution, and takes no packages. Expected a base image such as "
        "python:3.12-slim: `elasticcb zoo init {folder} --force --base_image=IMAGE`.",
    ),
    Advice(
        r"is not a supported wheel on this platform",
        "A wheel of --local_pkg_dir is for another Python, or another kind of machine, than the base image.",
    ),
    Advice(
        r"conflicting dependencies|ResolutionImpossible",
        "Packages of requirements.txt and elasticcb exclude one another: loosen the versions that pip names above.",
    ),
    Advice(
        r"(?i)no space left on device",
        "The disk of {engine} is full: `{engine} image prune` removes what is not used.",
    ),
    Advice(
        r"(?i)toomanyrequests|rate limit",
        "The registry of the base image takes no more requests from you for a while: log in with `{engine} login`, or "
        "name a mirror by --base_image of `elasticcb zoo init`.",
    ),
    Advice(
        r"error running container: |creating container for|crun: |runc create failed",
        "{engine} can start no containers here, as within another container. In the environment, "
        "BUILDAH_ISOLATION=chroot has podman and buildah do without.",
    ),
    Advice(
        r"(?i)exec format error",
        "The base image is for another kind of machine; --engine_flags=--platform=linux/amd64 names one.",
    ),
    Advice(
        r"(?i)pull access denied|manifest unknown|manifest for .* not found|unauthorized|repository does not exist|"
        r"short-name .* did not resolve|no such image|image not known",
        "The base image can't be pulled: look at its name in the line FROM of {folder}/Dockerfile, or log in with "
        "`{engine} login`.",
    ),
    Advice(
        r"(?i)name resolution|no such host|name or service not known|server misbehaving|dial tcp|connection refused",
        "A server could not be reached, of the base image or of packages: look at their names, the network, and the "
        "proxy of {engine}.",
    ),
    Advice(
        r"(?i)(COPY|stat|checking|cache key).*(no such file|not found|file does not exist|no items matching)",
        "A file that the Dockerfile copies is not in {folder}, or .dockerignore leaves it out.",
    ),
)
_PUSH = (
    _UNKNOWN_FLAG,
    Advice(
        r"server gave HTTP response to HTTPS client",
        "The registry {registry} speaks no TLS. podman and buildah take --engine_flags=--tls-verify=false; docker takes"
        " it when its daemon has it among `insecure-registries`.",
    ),
    Advice(
        r"(?i)\bx509|certificate",
        "{engine} does not trust the certificate of the registry {registry}: give it the CA's.",
    ),
    Advice(
        r"(?i)no such host|name or service not known|server misbehaving|name resolution|i/o timeout",
        "The registry {registry} is not known, or out of reach from here: look at the first part of the image's name.",
    ),
    Advice(
        r"(?i)connection refused|no route to host",
        "Nobody answers at {registry}: the registry does not run, or at another port.",
    ),
    Advice(
        r"(?i)name.unknown|repository .*(not found|does not exist)",
        "The registry {registry} has no such repository, and does not make one by itself: make it there first.",
    ),
    Advice(
        r"(?i)unauthorized|denied|authentication required|no basic auth|forbidden",
        "The registry {registry} does not let you push there. Log in with `{engine} login {registry}`, as one who may "
        "push to this repository.",
    ),
)


def build_advice(lines: Sequence[str], engine: str, folder: str) -> str:
    """What to do about a build that failed, from its last lines; "" when nothing is known."""
    return _advice(_BUILD, lines, engine=engine, folder=folder)


def push_advice(lines: Sequence[str], engine: str, registry: str) -> str:
    """What to do about a push that failed, from its last lines; "" when nothing is known."""
    return _advice(_PUSH, lines, engine=engine, registry=registry)


def _advice(table: Sequence[Advice], lines: Sequence[str], **names: str) -> str:
    text = "\n".join(lines)
    return next((each.words.format(**names) for each in table if re.search(each.pattern, text)), "")
