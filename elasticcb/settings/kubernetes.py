"""The settings of pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticcb.settings.definition import KUBERNETES, Kind, Section, setting

_AMOUNTS = "RESOURCE=AMOUNT,…"


def _request(whose: str) -> Any:
    text = f"What {whose} asks for, and is placed by: cpu, memory, disk, gpu, as cpu=2,memory=4Gi."
    return setting("", text, unit=_AMOUNTS)


def _limit(whose: str) -> Any:
    return setting("", f"What {whose} may take at most.", unit=_AMOUNTS)


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings(Section):
    """What pods are like; texts as the flags of the same names have them (cluster/kubernetes/flags.py)."""

    PANEL = KUBERNETES

    namespace: str = setting("default", "Namespace of the job.", unit="NAME")
    image: str = setting(
        "", "Container image with elasticcb and what the model file imports. Needed on Kubernetes.", unit="IMAGE"
    )
    image_pull_policy: str = setting(
        "",
        "When a node pulls the image.",
        kind=Kind.CHOICE,
        choices=("Always", "IfNotPresent", "Never"),
        default_text="that of Kubernetes",
    )
    service_account: str = setting(
        "",
        "Service account of the pods; the master's must be allowed to have pods made (deploy/kubernetes).",
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
        "",
        "PriorityClass of workers; high=0.5 gives half of them the class high, the others low.",
        unit="CLASS",
    )
    ps_pod_priority: str = setting("", "PriorityClass of parameter servers.", unit="CLASS")
    volume: str = setting(
        "",
        'Volumes of all pods: "claim_name=CLAIM,mount_path=/data", or host_path=PATH for claim_name; more keys: '
        "sub_path, read_only.",
        unit="VOLUME;…",
    )
    envs: str = setting(
        "",
        "Environment variables of all pods; pods read them from the job's Secret.",
        unit="NAME=VALUE,…",
    )
    env_from_secret: str = setting(
        "", "Secrets of the namespace, all of whose keys are environment variables of all pods.", unit="NAME,…"
    )
    node_selector: str = setting("", "Labels of the nodes that may have the pods.", unit="LABEL=VALUE,…")
    tolerations: str = setting("", "Taints of nodes that the pods tolerate.", unit="KEY=VALUE:EFFECT,…")
    restart_policy: str = setting(
        "Never",
        "What follows when the master's container ends before the job: Never: a new pod; OnFailure: a new container in "
        "the same pod.",
        kind=Kind.CHOICE,
        choices=("Never", "OnFailure"),
    )
    active_deadline_seconds: int = setting(
        0, "How long the job may run before Kubernetes ends it; 0: as long as it takes.", unit="SECONDS", minimum=0
    )
    ttl_seconds_after_finished: int = setting(
        604_800,
        "After which Kubernetes removes a job that is done or has failed, with its pods, token and certificates; 0: "
        "never.",
        unit="SECONDS",
        minimum=0,
    )
    cluster_spec: dict[str, Any] = setting(
        dict,
        "YAML with parts of pods, merged into those of the job: under all, master, worker and ps.",
        kind=Kind.FILE,
        unit="FILE",
        default_text="none",
    )
    master_pod: bool = setting(
        True,
        "false: the master is a process of this machine, with --host that the pods reach, and the others are pods.",
    )
