"""Parses the flags of Kubernetes into parts of manifests. Pure functions without access to the API."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elasticcb.errors import UsageError

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # a DNS label
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?")
_RESOURCES = {"cpu": "cpu", "memory": "memory", "disk": "ephemeral-storage", "gpu": "nvidia.com/gpu"}
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_VOLUME_KEYS = {"host_path", "claim_name", "mount_path", "sub_path", "read_only"}
_SCALES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15} | {
    f"{letter}i": 1024.0 ** (power + 1) for power, letter in enumerate("KMGTP")
}
LONGEST_NAME = 40  # of a job; its pods' names are longer, and Kubernetes allows 63 characters


@dataclass(frozen=True)
class Volume:
    """A volume that all pods of a job mount at the same path."""

    source: Mapping[str, Any]
    mount_path: str
    sub_path: str = ""
    read_only: bool = False


@dataclass(frozen=True)
class Priority:
    """The PriorityClass of pods: `name`; or "high" for a `share` of them and "low" for the others."""

    name: str = ""
    share: float | None = None

    def of(self, index: int) -> str:
        """The class of the pod with an index; "": the cluster's default. Pods of a class are spread evenly over the
        indices."""
        if self.share is None:
            return self.name
        return "high" if math.ceil((index + 1) * self.share) > math.ceil(index * self.share) else "low"


def parse_resources(text: str) -> dict[str, str]:
    """ "cpu=1,memory=4Gi,gpu=1" as a pod's `requests` or `limits`."""
    found = {}
    for name, value in _pairs(text, "cpu=500m,memory=2Gi"):
        key = _RESOURCES.get(name, name if "/" in name else "")
        if not key:
            raise UsageError(f"unknown resource {name!r}. Expected {', '.join(_RESOURCES)}, or DOMAIN/NAME.")
        if not _QUANTITY.fullmatch(value) or not amount(value):
            raise UsageError(f"{value!r} is not an amount of {name}. Expected an amount such as 2, 500m or 4Gi.")
        found[key] = value
    return found


def amount(quantity: str) -> float:
    """Converts a Kubernetes quantity to a number: "500m" is 0.5, "1Ki" 1024."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise UsageError(f"{quantity!r} is not a quantity.")
    return float(match[1]) * _SCALES[match[2] or ""]


def parse_volumes(text: str) -> list[Volume]:
    """ "host_path=/a,mount_path=/b;claim_name=c,mount_path=/d"."""
    example = "claim_name=data,mount_path=/data"
    volumes: list[Volume] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        values = dict(_pairs(part, example))
        unknown = sorted(values.keys() - _VOLUME_KEYS)
        if unknown:
            raise UsageError(f"{unknown[0]!r} is not a key of a volume. Expected {', '.join(sorted(_VOLUME_KEYS))}.")
        if ("host_path" in values) == ("claim_name" in values):
            count = "both" if "host_path" in values else "none"
            raise UsageError(
                f"{part!r} has {count} of host_path and claim_name. Expected exactly one, as in {example}."
            )
        for key in ("host_path", "mount_path"):
            if key in values and not values[key].startswith("/"):
                raise UsageError(f"{key}={values[key]} is not an absolute path. Expected a path that starts with /.")
        if "mount_path" not in values:
            raise UsageError(f"{part!r} lacks mount_path, the path in the pods. Expected {example}.")
        if values.get("read_only", "false") not in ("true", "false"):
            raise UsageError(f"read_only={values['read_only']} is invalid. Expected true or false.")
        read_only = values.get("read_only") == "true"
        if "host_path" in values:
            source: dict[str, Any] = {"hostPath": {"path": values["host_path"]}}
        else:
            claim = {"claimName": values["claim_name"]}
            source = {"persistentVolumeClaim": claim | ({"readOnly": True} if read_only else {})}
        mount_path = values["mount_path"].rstrip("/") or "/"
        if any(volume.mount_path == mount_path for volume in volumes):
            raise UsageError(f"mount_path={mount_path} is given twice. Give each volume its own path.")
        volumes.append(Volume(source, mount_path, values.get("sub_path", ""), read_only))
    return volumes


def parse_envs(text: str) -> dict[str, str]:
    """ "A=1,B=2"."""
    found = dict(_pairs(text, "TZ=UTC,OMP_NUM_THREADS=2", empty=True))
    for name in found:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(
                f"{name!r} is not a valid name of an environment variable. Expected letters, digits and underscores."
            )
    return found


def parse_secrets(text: str) -> list[str]:
    """ "s3-login,other", names of Secrets."""
    names = [name.strip() for name in text.split(",")] if text.strip() else []
    for name in names:
        if not re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", name):
            raise UsageError(
                f"{name!r} is not a valid name of a Secret. Expected lowercase letters, digits, hyphens and dots, as "
                "in s3-login."
            )
    return names


def parse_labels(text: str) -> dict[str, str]:
    """ "disk=ssd,zone=a", of nodes."""
    return dict(_pairs(text, "disktype=ssd,zone=a", empty=True))


def parse_tolerations(text: str) -> list[dict[str, str]]:
    """ "key=value:NoSchedule,key:NoExecute,key", as taints are written for kubectl."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        taint, colon, effect = part.partition(":")
        key, equals, value = taint.partition("=")
        if not key or (colon and effect not in _EFFECTS):
            raise UsageError(
                f"{part!r} is not a toleration. Expected KEY=VALUE:EFFECT, KEY:EFFECT or KEY, with an effect of "
                f"{', '.join(_EFFECTS)}."
            )
        toleration = {"key": key, "operator": "Equal" if equals else "Exists"}
        found.append(toleration | ({"value": value} if equals else {}) | ({"effect": effect} if colon else {}))
    return found


def parse_priority(text: str) -> Priority:
    """ "NAME", or "high=0.5": half of the pods "high", the others "low"."""
    name, equals, share = text.partition("=")
    if not equals:
        return Priority(parse_name(text)) if text else Priority()
    try:
        number = float(share)
    except ValueError:
        number = -1.0
    if name != "high" or not 0 <= number <= 1:
        raise UsageError(
            f"{text!r} is not a priority. Expected the name of a PriorityClass; or high=SHARE with a share from 0 to "
            "1, for pods of the classes high and low."
        )
    return Priority(share=number)


def parse_name(text: str) -> str:
    """The name of a Kubernetes object, or several such names separated by dots."""
    if len(text) > 253 or not all(len(part) <= 63 and _NAME.fullmatch(part) for part in text.split(".")):
        raise UsageError(
            f"{text!r} is not a valid name of a Kubernetes object. Expected lowercase letters, digits and dashes, "
            "starting and ending with a letter or a digit."
        )
    return text


def job_name(text: str) -> str:
    """The name of a job, which is the prefix of its pods' names."""
    if len(text) > LONGEST_NAME or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", text):
        raise UsageError(
            f"{text!r} is not a valid name of a job on Kubernetes. Expected at most {LONGEST_NAME} lowercase letters, "
            "digits and dashes, starting with a letter and ending with a letter or a digit."
        )
    return text


def safe_name(text: str, longest: int = LONGEST_NAME) -> str:
    """The valid job name that is closest to a text."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"job-{name}"
    return name[:longest].strip("-")


def _pairs(text: str, example: str, empty: bool = False) -> Iterator[tuple[str, str]]:
    seen = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not (value or empty):
            raise UsageError(f"{part!r} is not of the form NAME=VALUE. Expected a list such as {example}.")
        if name in seen:
            raise UsageError(f"{name!r} is given twice. Remove one of the two.")
        seen.add(name)
        yield name, value


# Parsers by flag; each raises `UsageError` for an invalid text.
PARSERS: dict[str, Callable[[str], Any]] = {
    "namespace": parse_name,
    "service_account": parse_name,
    "volume": parse_volumes,
    "envs": parse_envs,
    "env_from_secret": parse_secrets,
    "node_selector": parse_labels,
    "tolerations": parse_tolerations,
    **{
        f"{role}_resource_{kind}": parse_resources
        for role in ("master", "worker", "ps")
        for kind in ("request", "limit")
    },
    "master_pod_priority": parse_name,
    "ps_pod_priority": parse_name,
    "worker_pod_priority": parse_priority,
}
