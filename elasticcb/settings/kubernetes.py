"""The settings of pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticcb.settings.definition import KUBERNETES, Kind, Section, setting

_AMOUNTS = "RESOURCE=AMOUNT,…"


def _request(whose: str) -> Any:
    text = f"Resource request of {whose}: cpu, memory, disk, gpu; e.g. cpu=2,memory=4Gi."
    return setting("", text, unit=_AMOUNTS)


def _limit(whose: str) -> Any:
    return setting("", f"Resource limit of {whose}.", unit=_AMOUNTS)


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings(Section):
    """Settings of pods, as text in the form of the flags of the same names (cluster/kubernetes/flags.py)."""

    PANEL = KUBERNETES

    namespace: str = setting("default", "Kubernetes namespace of the job.", unit="NAME")
    image: str = setting(
        "",
        "Container image with elasticcb and the packages that the model file imports. Required on Kubernetes.",
        unit="IMAGE",
    )
    image_pull_policy: str = setting(
        "",
        "When nodes pull the image.",
        kind=Kind.CHOICE,
        choices=("Always", "IfNotPresent", "Never"),
        default_text="the default of Kubernetes",
    )
    service_account: str = setting(
        "",
        "Service account of the pods. The master needs permission to create pods (deploy/kubernetes).",
        unit="NAME",
        default_text="`default`",
    )
    master_resource_request: str = _request("the master's pod")
    master_resource_limit: str = _limit("the master's pod")
    worker_resource_request: str = _request("each worker")
    worker_resource_limit: str = _limit("each worker")
    ps_resource_request: str = _request("each parameter server")
    ps_resource_limit: str = _limit("each parameter server")
    master_pod_priority: str = setting("", "PriorityClass of the master's pod.", unit="CLASS")
    worker_pod_priority: str = setting(
        "", "PriorityClass of the workers; high=0.5 gives half of them the class high and the others low.", unit="CLASS"
    )
    ps_pod_priority: str = setting("", "PriorityClass of the parameter servers.", unit="CLASS")
    volume: str = setting(
        "",
        'Volumes of all pods: "claim_name=CLAIM,mount_path=/data", or host_path=PATH instead of claim_name. Further '
        "keys: sub_path, read_only.",
        unit="VOLUME;…",
    )
    envs: str = setting("", "Environment variables of all pods, stored in the job's Secret.", unit="NAME=VALUE,…")
    env_from_secret: str = setting(
        "", "Secrets in the namespace; each of their keys becomes an environment variable of all pods.", unit="NAME,…"
    )
    node_selector: str = setting("", "Labels that a node must have to run the pods.", unit="LABEL=VALUE,…")
    tolerations: str = setting("", "Node taints that the pods tolerate.", unit="KEY=VALUE:EFFECT,…")
    restart_policy: str = setting(
        "Never",
        "What happens when the master's container ends before the job does. Never: start a new pod; OnFailure: start "
        "a new container in the same pod.",
        kind=Kind.CHOICE,
        choices=("Never", "OnFailure"),
    )
    active_deadline_seconds: int = setting(
        0, "Time limit of the job, after which Kubernetes ends it; 0: no limit.", unit="SECONDS", minimum=0
    )
    ttl_seconds_after_finished: int = setting(
        604_800,
        "Time after which Kubernetes removes a finished or failed job, with its pods, token and certificates; 0: "
        "never.",
        unit="SECONDS",
        minimum=0,
    )
    cluster_spec: dict[str, Any] = setting(
        dict,
        "YAML file with pod specifications to merge into the job's pods, under the keys all, master, worker and ps.",
        kind=Kind.FILE,
        unit="FILE",
        default_text="none",
    )
    master_pod: bool = setting(
        True,
        "Run the master in a pod. false: run it as a process on this machine, at a {host} that the pods can reach.",
    )
