"""Manifests of a job's objects on Kubernetes: pods, the Job of its master, its Service and its Secret. Pure functions.

Every pod runs the `elasticcb` command in one container, as an unprivileged user with a read-only root file system: the
restricted Pod Security Standard of Kubernetes.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticcb.cluster.kubernetes.fate import CONTAINER
from elasticcb.cluster.kubernetes.flags import (
    Priority,
    Volume,
    amount,
    parse_envs,
    parse_labels,
    parse_priority,
    parse_resources,
    parse_secrets,
    parse_tolerations,
    parse_volumes,
)
from elasticcb.process.host import POD_NAME
from elasticcb.rpc.services import LIVE_PATH, PS_SERVICE, READY_PATH
from elasticcb.settings import KubernetesSettings

PORT, METRICS_PORT, HEALTH_PORT = 50051, 9464, 9465  # in its own pod; metrics are those of the master
POD_IP = "ELASTICCB_POD_IP"  # environment variable
JOB_LABEL, ROLE_LABEL, INDEX_LABEL, NUMBER_LABEL = (f"elasticcb/{name}" for name in ("job", "role", "index", "number"))
RESUMES = "elasticcb/resumes"  # annotation of a master: the uid of the Job whose work it continues
FILES = "/etc/elasticcb"  # in pods: files of the job's Secret, such as certificates, and these:
CONFIG, SPEC = "job.yaml", "cluster_spec.yaml"  # the job, and the patch of its pods
JOB_DIR_FLAG = "--job_dir="  # of a master
PRIVATE_FOLDER = "/tmp/elasticcb"  # with folders of jobs; lost with its pod
TOKEN_KEY = "token"  # in the job's Secret
_VARIABLE_KEY = "env."  # before the name of a variable, likewise
FAILED_CODES = (1, 2)  # exit codes of a master after which a retry is useless
GO_ON_CODE = 75
LEASE_SECONDS = 60  # after which another master may act even if the holder has not released the Lease
_USER = 1000
_START_SECONDS = 600  # for a master to start listening, even on a busy node
_DEAF_SECONDS = 180  # after which a master that does not answer is killed
_PROBE_SECONDS = 10
_GRACE_SECONDS = 60  # to save the state
_MOST_MASTERS = 10
_COMMAND = ["elasticcb"]
_LONGEST_EVENT = 1024  # characters
_REASONS = (  # text in a line, and the reason and type of its event
    (" was lost: ", "ProcessLost", "Warning"),
    (" leaves: ", "ProcessLost", "Warning"),
    ("Not started yet: ", "ProcessesWait", "Warning"),
    (" is a straggler: ", "Straggler", "Warning"),
    (" recovered in ", "ServerRecovered", "Normal"),
    (" job now has ", "Scaled", "Normal"),
)
_MORE_MEMORY, _MOST_MEMORY = 1.5, 4.0  # factor, after a pod ran out of memory


@dataclass(frozen=True)
class PodPlan:
    """The common properties of all pods of a job.

    Args:
        job: its name.
        settings: checked settings from the user's flags.
        environment: environment variables of every process.
        token_variable: the environment variable for the job's token.
        owner: an `ownerReferences` entry; a pod is removed with its owner.
        grpc_probes: the cluster supports gRPC probes (Kubernetes 1.24 or later).
    """

    job: str
    settings: KubernetesSettings
    environment: Mapping[str, str] = field(default_factory=dict)
    token_variable: str = ""
    owner: Mapping[str, Any] | None = None
    grpc_probes: bool = False

    def labels(self, role: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "elasticcb",
            "app.kubernetes.io/instance": self.job,
            JOB_LABEL: self.job,
            ROLE_LABEL: role,
        }

    def pod(self, role: str, index: int, number: int, arguments: Sequence[str], ooms: int = 0) -> dict[str, Any]:
        """The pod of a worker or a parameter server."""
        manifest = self._template(role, index, arguments, ooms, probes=self._server_probes() if role == "ps" else {})
        metadata = manifest["metadata"]
        metadata["name"] = f"{self.job}-{role}-{index}" + (f"-{number}" if number else "")
        metadata["namespace"] = self.settings.namespace
        metadata["labels"] |= {INDEX_LABEL: str(index), NUMBER_LABEL: str(number)}
        if self.owner is not None:
            metadata["ownerReferences"] = [dict(self.owner)]
        if role == "ps":
            manifest["spec"] = {
                "hostname": f"{self.job}-ps-{index}",
                "subdomain": names_of_servers(self.job),
            } | manifest["spec"]
        return {"apiVersion": "v1", "kind": "Pod", **manifest}

    def master_job(
        self,
        arguments: Sequence[str],
        metrics_port: int = METRICS_PORT,
        health_port: int = HEALTH_PORT,
    ) -> dict[str, Any]:
        """The Job that keeps the master's pod."""
        template = self._template("master", 0, arguments, 0, _master_probes(metrics_port, health_port))
        scraped = {"scrape": "true", "port": str(metrics_port), "path": "/metrics"}
        metadata = template["metadata"]
        metadata["annotations"] = {f"prometheus.io/{key}": value for key, value in scraped.items()} | metadata.get(
            "annotations", {}
        )
        policy = self.settings.restart_policy
        spec: dict[str, Any] = {"backoffLimit": _MOST_MASTERS, "completions": 1, "parallelism": 1, "template": template}
        limits = {
            "activeDeadlineSeconds": self.settings.active_deadline_seconds,
            "ttlSecondsAfterFinished": self.settings.ttl_seconds_after_finished,
        }
        spec |= {name: seconds for name, seconds in limits.items() if seconds}
        template["spec"]["restartPolicy"] = policy
        if policy == "Never":  # required by Kubernetes; releases before 1.26 drop it
            spec["podFailurePolicy"] = {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    _on_exit_codes("Ignore", (GO_ON_CODE,)),
                    _on_exit_codes("FailJob", FAILED_CODES),
                ]
            }
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": self._metadata("master"), "spec": spec}

    def service(self) -> dict[str, Any]:
        """A stable address of the master, independent of its pod."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata("master"),
            "spec": {
                "selector": {JOB_LABEL: self.job, ROLE_LABEL: "master"},
                "ports": [{"name": "grpc", "port": PORT, "targetPort": PORT, "protocol": "TCP"}],
                "publishNotReadyAddresses": True,
            },
        }

    def server_names(self) -> dict[str, Any]:
        """Gives each server the name JOB-ps-N.JOB-ps.NAMESPACE.svc, independent of its pod."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata("ps") | {"name": names_of_servers(self.job)},
            "spec": {
                "clusterIP": "None",
                "selector": {JOB_LABEL: self.job, ROLE_LABEL: "ps"},
                "ports": [
                    {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                    for name, port in (("grpc", PORT), ("health", HEALTH_PORT))
                ],
                "publishNotReadyAddresses": True,
            },
        }

    def secret(self, token: str, files: Mapping[str, bytes]) -> dict[str, Any]:
        """The token of the job, the user's environment variables, and files by name, for `FILES`."""
        variables = {_VARIABLE_KEY + name: value.encode() for name, value in parse_envs(self.settings.envs).items()}
        contents = {TOKEN_KEY: token.encode(), **variables, **files}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._metadata("secret"),
            "type": "Opaque",
            "data": {name: base64.b64encode(content).decode() for name, content in contents.items()},
        }

    def lease(self) -> dict[str, Any]:
        """The Lease that the job's master must hold; not held yet."""
        return lease_with(self._metadata("master"))

    def event(self, text: str, name: str, now: str) -> dict[str, Any]:
        """An event of the owner of the job's pods."""
        reason, kind = next((found for sign, *found in _REASONS if sign in text), ("Told", "Normal"))
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{self.job}.{name}", "namespace": self.settings.namespace},
            "involvedObject": {**(self.owner or {}), "namespace": self.settings.namespace},
            "reason": reason,
            "type": kind,
            "message": text[:_LONGEST_EVENT],
            "source": {"component": "elasticcb"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }

    def _metadata(self, role: str) -> dict[str, Any]:
        return {"name": self.job, "namespace": self.settings.namespace, "labels": self.labels(role)}

    def _template(
        self,
        role: str,
        index: int,
        arguments: Sequence[str],
        ooms: int,
        probes: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        settings = self.settings
        volumes, mounts = self._volumes()
        container = self._container(role, arguments, ooms, mounts) | dict(probes or {})
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            "automountServiceAccountToken": role == "master",  # other pods need no API access
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
        }
        optional = {
            "serviceAccountName": settings.service_account,
            "priorityClassName": self._priority(role).of(index),
            "nodeSelector": parse_labels(settings.node_selector),
            "tolerations": parse_tolerations(settings.tolerations),
        }
        spec |= {name: value for name, value in optional.items() if value}
        manifest = {"metadata": {"labels": self.labels(role)}, "spec": spec}
        for part in ("all", role):
            manifest = patched(manifest, settings.cluster_spec.get(part) or {})
        return manifest

    def _container(
        self, role: str, arguments: Sequence[str], ooms: int, mounts: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        container: dict[str, Any] = {
            "name": CONTAINER,
            "image": self.settings.image,
            "command": list(_COMMAND),
            "args": list(arguments),
            "env": self._environment(),
            "envFrom": [{"secretRef": {"name": name}} for name in parse_secrets(self.settings.env_from_secret)],
            "resources": resources(self.settings, role, ooms),
            "volumeMounts": list(mounts),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
        }
        if not container["envFrom"]:
            del container["envFrom"]
        if self.settings.image_pull_policy:
            container["imagePullPolicy"] = self.settings.image_pull_policy
        return container

    def _volumes(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """A pod's volumes, and their mounts in its container."""
        volumes: list[dict[str, Any]] = [
            {"name": "tmp", "emptyDir": {}},
            {"name": "files", "secret": {"secretName": self.job}},
        ]
        mounts: list[dict[str, Any]] = [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "files", "mountPath": FILES, "readOnly": True},
        ]
        for number, volume in enumerate(parse_volumes(self.settings.volume)):
            volumes.append({"name": f"volume-{number}", **volume.source})
            mounts.append(_mount(f"volume-{number}", volume))
        return volumes, mounts

    @property
    def shares_network(self) -> bool:
        """Whether servers use the network of their node, where other processes may hold their ports."""
        spec = patched(*(self.settings.cluster_spec.get(part) or {} for part in ("all", "ps"))).get("spec") or {}
        return bool(spec.get("hostNetwork"))

    def _server_probes(self) -> dict[str, Any]:
        """The master itself detects dead servers; Kubernetes only learns whether a server holds its part of the
        model, which disruption budgets count."""
        if self.shares_network:
            return {}
        probes: dict[str, Any] = {"ports": [_port("grpc", PORT), _port("health", HEALTH_PORT)]}
        if self.grpc_probes:
            check = {"grpc": {"port": HEALTH_PORT, "service": PS_SERVICE}}
            probes["readinessProbe"] = check | {"periodSeconds": _PROBE_SECONDS, "timeoutSeconds": _PROBE_SECONDS}
        return probes

    def _environment(self) -> list[dict[str, Any]]:
        own = parse_envs(self.settings.envs)
        secrets = {self.token_variable: TOKEN_KEY, **{name: _VARIABLE_KEY + name for name in own}}
        variables: list[dict[str, Any]] = [
            {"name": POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ]
        for name, key in secrets.items():
            variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": self.job, "key": key}}})
        plain = {"HOME": "/tmp", **self.environment}
        return variables + [{"name": name, "value": value} for name, value in plain.items() if name not in secrets]

    def _priority(self, role: str) -> Priority:
        return parse_priority(getattr(self.settings, f"{role}_pod_priority"))


def lease_with(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A Lease that the master of a job must hold; nobody holds it yet."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {"leaseDurationSeconds": LEASE_SECONDS},
    }


def names_of_servers(job: str) -> str:
    """The Service that gives the parameter servers of a job their names."""
    return f"{job}-ps"


def _master_probes(metrics_port: int, health_port: int) -> dict[str, Any]:
    """An HTTP probe, which every Kubernetes release supports. Nothing else would detect a hanging master."""

    def probe(path: str, seconds: int) -> dict[str, Any]:
        every = {"periodSeconds": _PROBE_SECONDS, "timeoutSeconds": _PROBE_SECONDS}
        return {
            "httpGet": {"path": path, "port": "metrics"}, **every, "failureThreshold": seconds // _PROBE_SECONDS,
        }  # fmt: skip

    return {
        "ports": [_port("grpc", PORT), _port("metrics", metrics_port), _port("health", health_port)],
        "startupProbe": probe(LIVE_PATH, _START_SECONDS),
        "livenessProbe": probe(LIVE_PATH, _DEAF_SECONDS),
        "readinessProbe": probe(READY_PATH, _PROBE_SECONDS),
    }


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _mount(name: str, volume: Volume) -> dict[str, Any]:
    mount: dict[str, Any] = {"name": name, "mountPath": volume.mount_path}
    if volume.sub_path:
        mount["subPath"] = volume.sub_path
    return mount | ({"readOnly": True} if volume.read_only else {})


def _on_exit_codes(action: str, codes: Sequence[int]) -> dict[str, Any]:
    on_exit_codes = {"containerName": CONTAINER, "operator": "In", "values": list(codes)}
    return {"action": action, "onExitCodes": on_exit_codes, "onPodConditions": []}  # 1.26 requires both


def patched(manifest: Any, patch: Any) -> Any:
    """Applies a patch to a manifest: mappings are merged, null removes a key, lists of named items are merged by name,
    and everything else is replaced."""
    if isinstance(manifest, Mapping) and isinstance(patch, Mapping):
        merged = dict(manifest)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = patched(merged.get(key), value)
        return merged
    if isinstance(manifest, list) and _all_named([*manifest, *(patch if isinstance(patch, list) else [None])]):
        by_name = {each["name"]: each for each in manifest}
        for each in patch:
            by_name[each["name"]] = patched(by_name.get(each["name"]), each)
        return list(by_name.values())
    return copy.deepcopy(patch)


def _all_named(entries: Sequence[Any]) -> bool:
    return all(isinstance(each, Mapping) and "name" in each for each in entries)


def resources(settings: KubernetesSettings, role: str, ooms: int = 0) -> dict[str, Any]:
    """A container's `resources`, with more memory after `ooms` out-of-memory kills."""
    requests = parse_resources(getattr(settings, f"{role}_resource_request"))
    limits = parse_resources(getattr(settings, f"{role}_resource_limit"))
    for gpu in (name for name in requests if "/" in name):  # which can't be overcommitted
        limits.setdefault(gpu, requests[gpu])
    for part in (requests, limits):
        if ooms and "memory" in part:
            times = min(_MORE_MEMORY**ooms, _MOST_MEMORY)
            part["memory"] = f"{int(amount(part['memory']) * times / 2**20)}Mi"
    return {name: part for name, part in (("requests", requests), ("limits", limits)) if part}


def after_oom(settings: KubernetesSettings, role: str, ooms: int) -> tuple[int, str]:
    """Counts out-of-memory kills, this one included, and says how much memory the next container gets."""
    if "memory" not in resources(settings, role).get("limits", {}):
        return ooms, f"; it has no limit, but its node had no memory left. Request more with --{role}_resource_request"
    memory = resources(settings, role, ooms + 1)["limits"]["memory"]
    if _MORE_MEMORY**ooms < _MOST_MEMORY:
        return ooms + 1, f"; the next one gets {memory}"
    return ooms + 1, f"; the next one gets {memory} again, the maximum. Raise --{role}_resource_limit"
