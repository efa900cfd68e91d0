"""The flags of jobs on Kubernetes; options.py has them in its table."""

from __future__ import annotations

from elasticcb.cli.option import Kind, Option

KUBERNETES = "Kubernetes"

_WHOSE = {"master": "the master's pod", "worker": "each worker", "ps": "each parameter server"}
_RESOURCES = "RESOURCE=AMOUNT,…"


def _option(name: str, value: str, help: str, kind: Kind = Kind.TEXT, field: str = "", **more: object) -> Option:
    return Option(
        name=name,
        field=field or f"cluster.kubernetes.{name}",
        panel=KUBERNETES,
        kind=kind,
        value=value,
        help=help,
        **more,  # type: ignore[arg-type]
    )


def _resource_options(role: str, whose: str) -> tuple[Option, ...]:
    return (
        _option(
            f"{role}_resource_request",
            _RESOURCES,
            f"What {whose} asks for, and is placed by: cpu, memory, disk, gpu, as cpu=2,memory=4Gi.",
        ),
        _option(f"{role}_resource_limit", _RESOURCES, f"What {whose} may take at most."),
    )


KUBERNETES_OPTIONS: tuple[Option, ...] = (
    _option("namespace", "NAME", "Namespace of the job."),
    _option("image", "IMAGE", "Container image with elasticcb and what the model file imports. Needed on Kubernetes."),
    _option(
        "image_pull_policy",
        "",
        "When a node pulls the image.",
        Kind.CHOICE,
        choices=("Always", "IfNotPresent", "Never"),
        default_text="that of Kubernetes",
    ),
    _option(
        "service_account",
        "NAME",
        "Service account of the pods; the master's must be allowed to have pods made (deploy/kubernetes).",
        default_text="`default`",
    ),
    *(option for role, whose in _WHOSE.items() for option in _resource_options(role, whose)),
    _option("master_pod_priority", "CLASS", "PriorityClass of the master's pod."),
    _option(
        "worker_pod_priority",
        "CLASS",
        "PriorityClass of workers; high=0.5 gives half of them the class high, the others low.",
    ),
    _option("ps_pod_priority", "CLASS", "PriorityClass of parameter servers."),
    _option(
        "volume",
        "VOLUME;…",
        'Volumes of all pods: "claim_name=CLAIM,mount_path=/data", or host_path=PATH for claim_name; more keys: '
        "sub_path, read_only.",
    ),
    _option("envs", "NAME=VALUE,…", "Environment variables of all pods."),
    _option("node_selector", "LABEL=VALUE,…", "Labels of the nodes that may have the pods."),
    _option("tolerations", "KEY=VALUE:EFFECT,…", "Taints of nodes that the pods tolerate."),
    _option(
        "restart_policy",
        "",
        "What follows when the master's container ends before the job: Never: a new pod; OnFailure: a new container in "
        "the same pod.",
        Kind.CHOICE,
        choices=("Never", "OnFailure"),
    ),
    _option(
        "cluster_spec",
        "FILE",
        "YAML with parts of pods, merged into those of the job: under all, master, worker and ps.",
        Kind.FILE,
        default_text="none",
    ),
    _option(
        "master_pod",
        "",
        "false: the master is a process of this machine, with --host that the pods reach, and the others are pods.",
        Kind.TRUTH,
    ),
    _option(
        "yaml",
        "FILE",
        "Write the manifests of the job into a file, for kubectl, and submit nothing.",
        Kind.FILE,
        field="submission.yaml",
    ),
    _option(
        "dry_run",
        "",
        "Have the API server check all, and start nothing. `--dry_run` alone is true.",
        Kind.TRUTH,
        field="submission.dry_run",
    ),
)
