"""Checks of the flags of jobs on Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from elasticcb.cluster.base import Given
from elasticcb.cluster.kubernetes import api
from elasticcb.cluster.kubernetes.flags import PARSERS, amount, job_name, parse_resources
from elasticcb.errors import UsageError
from elasticcb.security.credentials import is_loopback

PATCHED = ("all", "master", "worker", "ps")  # keys of a --cluster_spec


def mistakes(given: Given) -> Iterator[str]:
    """Messages about invalid flags."""
    if given["follow"]:
        yield "--follow evaluates on this machine, one checkpoint after another. Remove --cluster=kubernetes."
    try:
        api.check_installed()
    except UsageError as error:
        yield str(error)
    if given["dashboard"] and given["master_pod"] is not False:
        yield (
            "--dashboard needs the master on this machine, but with --cluster=kubernetes it runs in a pod. Remove "
            "one of the two, or set --master_pod=false."
        )
    if not given["image"]:
        yield "--image is missing: the container image of the pods. --cluster=kubernetes requires it."
    for name, parse in PARSERS.items():
        if given[name]:
            try:
                parse(given[name])
            except UsageError as error:
                yield f"{given.flag(name)}: {error}"
    yield from _check_resources(given)
    if given["cluster_spec"]:
        try:
            read_cluster_spec(given.folder("cluster_spec"))
        except UsageError as error:
            yield f"{given.flag('cluster_spec')}: {error}"
    if given["job_name"]:
        try:
            job_name(given["job_name"])
        except UsageError as error:
            yield f"{given.flag('job_name')}: {error}"
    if given["master_pod"] is False and is_loopback(given["host"] or "127.0.0.1"):
        yield "--master_pod=false needs --host: an address of this machine that the pods can reach."


def _check_resources(given: Given) -> Iterator[str]:
    for role in ("master", "worker", "ps"):
        names = [f"{role}_resource_{kind}" for kind in ("request", "limit")]
        try:
            request, limit = (parse_resources(given[name] or "") for name in names)
        except UsageError:
            continue  # already reported
        for resource in request.keys() & limit.keys():
            if amount(request[resource]) > amount(limit[resource]):
                yield (
                    f"{given.flag(names[0])} requests {resource}={request[resource]}, more than the limit "
                    f"{limit[resource]} in {given.flag(names[1])}. Lower the request, or raise the limit."
                )


def read_cluster_spec(path: str) -> dict[str, Any]:
    """The pod patches in a file. Raises `UsageError` if it contains something else."""
    expected = f"Expected YAML with pod patches under {', '.join(PATCHED)}, such as `worker: {{spec: …}}`."
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}. {expected}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}. {expected}") from None
    if not isinstance(found, dict) or not all(isinstance(part, dict) for part in found.values()):
        raise UsageError(f"{path} contains no pod patches. {expected}")
    unknown = sorted(str(part) for part in found if part not in PATCHED)
    if unknown:
        raise UsageError(f"{path} has the unknown key {unknown[0]!r}. {expected}")
    strange = sorted({str(key) for part in found.values() for key in part} - {"metadata", "spec"})
    if strange:
        raise UsageError(f"{path} has {strange[0]!r} where a pod has only metadata and spec. {expected}")
    return found
