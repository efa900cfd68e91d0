"""The settings of a job's processes: how many, where, how they reach each other, and when one is given up."""

from __future__ import annotations

from dataclasses import dataclass

from elasticcb.settings.choices import WorkerRange
from elasticcb.settings.definition import CLUSTER, TASKS, TRAIN, Kind, Section, setting
from elasticcb.settings.kubernetes import KubernetesSettings

INSECURE_RISK = "whoever can read the network, or takes the port of a process that has died, gets the job's token"


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(Section):
    """How the processes reach each other, and who reaches the master."""

    PANEL = CLUSTER

    # "": the address of this machine that its processes reach
    host: str = setting(
        "",
        "Address to listen on; one that the other machines reach, where there are some.",
        unit="ADDRESS",
        pattern=r"[^/\s]+",
        expected="an address like 0.0.0.0, without a port",
        default_text="a folder of Unix sockets; 127.0.0.1 with --port, --tls, --tls_ca or --cluster=external; "
        "with --cluster=ray its node's",
        roles=("ps",),
    )
    port: int = setting(
        0, "Port to listen on; 0: any that is free.", unit="PORT", minimum=0, maximum=65535, roles=("ps",)
    )
    metrics_port: int | None = setting(
        None,
        "Port on which the master serves metrics to Prometheus, by HTTP; 0: any that is free.",
        unit="PORT",
        minimum=0,
        maximum=65535,
        default_text="none are served",
    )
    health_port: int | None = setting(
        None,
        "Port on which gRPC health checks are answered, as Kubernetes makes them; 0: any that is free.",
        unit="PORT",
        minimum=0,
        maximum=65535,
        default_text="none are answered",
        roles=("ps",),
    )
    ray_address: str = setting(
        "",
        "With --cluster=ray: which Ray cluster. The command must run on one of its nodes.",
        unit="HOST:PORT",
        default_text="RAY_ADDRESS, or the cluster of this machine",
    )
    tls: bool = setting(
        False,
        "Use TLS also between processes of one machine, which otherwise have Unix sockets. Processes with ports use it "
        "unless --insecure is given, with a CA that is made for the job (in `tls` in its folder).",
    )
    insecure: bool = setting(
        False,
        f"Turn TLS off: {INSECURE_RISK}.",
        roles=("ps", "worker"),
    )
    tls_cert: str = setting(
        "",
        "TLS with certificates of your own: a PEM file with this process's.",
        kind=Kind.FILE,
        roles=("ps", "worker"),
    )
    tls_key: str = setting(
        "", "PEM file with its private key, without a password.", kind=Kind.FILE, roles=("ps", "worker")
    )
    tls_ca: str = setting(
        "",
        "PEM file with the CA that has signed the certificates of all processes. A file that also holds the CA's key "
        "is enough: each process issues its own certificate.",
        kind=Kind.FILE,
        roles=("ps", "worker"),
    )
    tls_name: str = setting(
        "",
        "What a server's certificate must be for: the same name in all of them.",
        unit="NAME",
        default_text="the address that it listens on",
        roles=("ps", "worker"),
    )


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions(Section):
    """When a process is given up, and what follows."""

    PANEL = CLUSTER

    ps_replicas: int = setting(
        0,
        "1: each parameter server hands its updates to the next one before it answers, so that one that is killed "
        "loses none; needs at least 2.",
        unit="REPLICAS",
        minimum=0,
        maximum=1,
        commands=TRAIN,
    )
    max_worker_restarts: int = setting(
        10,
        "Workers that are started in the place of lost ones, over the whole job.",
        unit="PROCESSES",
        minimum=0,
    )
    max_ps_restarts: int = setting(
        10,
        "Parameter servers that are started in the place of lost ones, over the whole job.",
        unit="PROCESSES",
        minimum=0,
    )
    lease_seconds: float = setting(
        300.0,
        "A task without progress for so long is taken from its worker and given to another; while a batch is computed, "
        "after 12 times as long.",
        panel=TASKS,
        unit="SECONDS",
        above=0,
    )
    silence_seconds: float = setting(
        30.0,
        "A parameter server that is not heard of for so long is replaced; with --cluster=external, a worker, too. A "
        "shorter --lease_seconds shortens it.",
        unit="SECONDS",
        above=0,
    )

    @property
    def patience_seconds(self) -> float:
        """Of calls to a server: longer than it takes to notice that it does not answer, or is not heard of, and to put
        another in its place."""
        return 60.0 + 2 * self.silence_seconds


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(NetworkOptions, RecoveryOptions):
    """How many processes, and who starts them."""

    kind: str = setting(  # a backend of cluster/registry.py, which knows the others
        "local",
        "Who starts the processes.",
        unit="CLUSTER",
        name="cluster",
        argument="kind",
    )
    num_workers: int = setting(
        1,
        "Workers.",
        unit="PROCESSES",
        minimum=1,
        because="Workers are what runs the batches.",
        argument="num_workers",
    )
    autoscale: WorkerRange = setting(
        WorkerRange(),
        "Add workers while the throughput grows by it, and give back those that don't help: as 1..8. The job begins "
        "with --num_workers, or MIN.",
        unit="MIN..MAX",
        commands=TRAIN,
    )
    num_ps: int = setting(
        1,
        "Parameter servers.",
        unit="PROCESSES",
        minimum=1,
        because="The weights live on the parameter servers.",
        aliases=("num_ps_pods",),
        argument="num_ps",
    )
    dashboard: bool = setting(
        False,
        "Serve a live page of the job to browsers of this machine, and print its address; needs elasticcb[dashboard].",
        argument="dashboard",
    )
    kubernetes: KubernetesSettings = KubernetesSettings()
