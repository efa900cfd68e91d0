"""Derives advice from the output of a container engine that failed. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """Advice `words` for an engine whose last lines match `pattern`."""

    pattern: str
    words: str


_UNKNOWN_FLAG = Advice(
    r"unknown (shorthand )?flag",
    "{engine} does not know a flag in --engine_flags. See its --help for valid flags.",
)
# The first match wins.
_BUILD = (
    _UNKNOWN_FLAG,
    Advice(
        r"No matching distribution found for elasticcb",
        "This version of elasticcb is on no package index for the base image's Python. Build a wheel of your "
        "checkout with `pip wheel --no-deps --wheel-dir=wheels CHECKOUT`, then run `elasticcb zoo init {folder} "
        "--force --local_pkg_dir=wheels`; or choose a --base_image that contains it.",
    ),
    Advice(
        r"No matching distribution found for",
        "A package in requirements.txt is on no package index for the base image's Python. Check its name and "
        "version above. `elasticcb zoo init` takes another index with --extra_pypi_index, and wheels with "
        "--local_pkg_dir.",
    ),
    Advice(
        r"python: (command )?not found|executable file .?python.? not found|python\W+ executable file not found|"
        r"No module named pip",
        "The base image has no `python` with pip. Expected an image such as python:3.12-slim: `elasticcb zoo init "
        "{folder} --force --base_image=IMAGE`.",
    ),
    Advice(
        r"externally-managed-environment",
        "The base image's Python is managed by its distribution and refuses packages. Expected a base image such as "
        "python:3.12-slim: `elasticcb zoo init {folder} --force --base_image=IMAGE`.",
    ),
    Advice(
        r"is not a supported wheel on this platform",
        "A wheel in --local_pkg_dir does not match the base image's Python version or platform.",
    ),
    Advice(
        r"conflicting dependencies|ResolutionImpossible",
        "Packages in requirements.txt conflict with those of elasticcb. Relax the versions that pip names above.",
    ),
    Advice(
        r"(?i)no space left on device",
        "The disk of {engine} is full. Remove unused images with `{engine} image prune`.",
    ),
    Advice(
        r"(?i)toomanyrequests|rate limit",
        "The registry of the base image is limiting your requests. Log in with `{engine} login`, or choose a mirror "
        "with --base_image of `elasticcb zoo init`.",
    ),
    Advice(
        r"error running container: |creating container for|crun: |runc create failed",
        "{engine} can't start containers here, for example because it runs inside a container. Set the environment "
        "variable BUILDAH_ISOLATION=chroot: podman and buildah then need no containers to build.",
    ),
    Advice(
        r"(?i)exec format error",
        "The base image is for another platform. Choose the platform, e.g. --engine_flags=--platform=linux/amd64.",
    ),
    Advice(
        r"(?i)pull access denied|manifest unknown|manifest for .* not found|unauthorized|repository does not exist|"
        r"short-name .* did not resolve|no such image|image not known",
        "The base image can't be pulled. Check its name in the FROM line of {folder}/Dockerfile, or log in with "
        "`{engine} login`.",
    ),
    Advice(
        r"(?i)name resolution|no such host|name or service not known|server misbehaving|dial tcp|connection refused",
        "The server of the base image or of packages can't be reached. Check its name, the network, and the proxy "
        "settings of {engine}.",
    ),
    Advice(
        r"(?i)(COPY|stat|checking|cache key).*(no such file|not found|file does not exist|no items matching)",
        "A file that the Dockerfile copies is not in {folder}, or .dockerignore excludes it.",
    ),
)
_PUSH = (
    _UNKNOWN_FLAG,
    Advice(
        r"server gave HTTP response to HTTPS client",
        "The registry {registry} does not support TLS. For podman and buildah, add "
        "--engine_flags=--tls-verify=false; for docker, add the registry to `insecure-registries` of its daemon.",
    ),
    Advice(
        r"(?i)\bx509|certificate",
        "{engine} does not trust the certificate of the registry {registry}. Install the certificate of its CA.",
    ),
    Advice(
        r"(?i)no such host|name or service not known|server misbehaving|name resolution|i/o timeout",
        "The registry {registry} is unknown or unreachable. Check the first part of the image's name.",
    ),
    Advice(
        r"(?i)connection refused|no route to host",
        "Nothing listens at {registry}. Check that the registry is running, and its port.",
    ),
    Advice(
        r"(?i)name.unknown|repository .*(not found|does not exist)",
        "The registry {registry} has no such repository, and does not create it automatically. Create it there first.",
    ),
    Advice(
        r"(?i)unauthorized|denied|authentication required|no basic auth|forbidden",
        "The registry {registry} does not let you push. Log in with `{engine} login {registry}` as a user who may "
        "push to this repository.",
    ),
)


def build_advice(lines: Sequence[str], engine: str, folder: str) -> str:
    """Advice about a failed build, from its last lines; "" if there is none."""
    return _advice(_BUILD, lines, engine=engine, folder=folder)


def push_advice(lines: Sequence[str], engine: str, registry: str) -> str:
    """Advice about a failed push, from its last lines; "" if there is none."""
    return _advice(_PUSH, lines, engine=engine, registry=registry)


def _advice(table: Sequence[Advice], lines: Sequence[str], **names: str) -> str:
    text = "\n".join(lines)
    return next((each.words.format(**names) for each in table if re.search(each.pattern, text)), "")
