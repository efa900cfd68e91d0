"""The settings of a job's processes: how many, where they run, how they connect, and when one is replaced."""

from __future__ import annotations

from dataclasses import dataclass

from elasticcb.settings.choices import LostUpdates, WorkerRange
from elasticcb.settings.definition import CLUSTER, TASKS, TRAIN, Kind, Section, setting
from elasticcb.settings.kubernetes import KubernetesSettings

INSECURE_RISK = "anyone who can read the network, or reuses the port of a dead process, gets the job's token"


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(Section):
    """How processes connect to each other, and how others reach the master."""

    PANEL = CLUSTER
    GROUP = "network"

    # "": the address of this machine that its own processes use
    host: str = setting(
        "",
        "Address to listen on. With several machines, one that the others can reach.",
        unit="ADDRESS",
        pattern=r"[^/\s]+",
        expected="an address like 0.0.0.0, without a port",
        default_text="a folder of Unix sockets; 127.0.0.1 with {port}, {tls}, {tls_ca} or {cluster:external}; "
        "with {cluster:ray} its node's",
        roles=("ps",),
    )
    port: int = setting(0, "Port to listen on; 0: any free port.", unit="PORT", minimum=0, maximum=65535, roles=("ps",))
    metrics_port: int | None = setting(
        None,
        "Port on which the master serves Prometheus metrics over HTTP; 0: any free port.",
        unit="PORT",
        minimum=0,
        maximum=65535,
        default_text="metrics are not served",
    )
    health_port: int | None = setting(
        None,
        "Port of the gRPC health service, for Kubernetes probes and the like; 0: any free port.",
        unit="PORT",
        minimum=0,
        maximum=65535,
        default_text="no health service",
        roles=("ps",),
    )
    ray_address: str = setting(
        "",
        "With {cluster:ray}: address of the Ray cluster. Run the command on one of its nodes.",
        unit="HOST:PORT",
        default_text="RAY_ADDRESS, or the Ray cluster of this machine",
    )
    tls: bool = setting(
        False,
        "Use TLS also between processes of one machine, which otherwise use Unix sockets. Processes that listen on "
        "ports always use TLS unless {insecure} is given, with a CA created for the job (in `tls` in its folder).",
    )
    insecure: bool = setting(False, f"Turn TLS off: {INSECURE_RISK}.", roles=("ps", "worker"))
    tls_cert: str = setting(
        "",
        "TLS with your own certificates: PEM file with the certificate of this process.",
        kind=Kind.FILE,
        roles=("ps", "worker"),
    )
    tls_key: str = setting(
        "", "PEM file with the private key of {tls_cert}, without a password.", kind=Kind.FILE, roles=("ps", "worker")
    )
    tls_ca: str = setting(
        "",
        "PEM file with the CA that signed the certificates of all processes. If the file also contains the CA's key, "
        "no other file is needed: each process issues its own certificate.",
        kind=Kind.FILE,
        roles=("ps", "worker"),
    )
    tls_name: str = setting(
        "",
        "Name that the certificate of every server must contain.",
        unit="NAME",
        default_text="the address that it listens on",
        roles=("ps", "worker"),
    )


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions(Section):
    """When a process counts as lost, and how it is replaced."""

    PANEL = CLUSTER
    GROUP = "recovery"

    lost_updates: LostUpdates = setting(
        LostUpdates.REPEAT,
        "A killed parameter server loses the updates since its last recovery file: train their batches again, or "
        "accept the loss.",
        commands=TRAIN,
    )
    max_worker_restarts: int = setting(
        10, "Maximum number of lost workers that are replaced during the job.", unit="PROCESSES", minimum=0
    )
    max_ps_restarts: int = setting(
        10, "Maximum number of lost parameter servers that are replaced during the job.", unit="PROCESSES", minimum=0
    )
    lease_seconds: float = setting(
        300.0,
        "Timeout of a task without progress; it is then given to another worker. While a batch is being computed, "
        "the timeout is 12 times as long.",
        panel=TASKS,
        unit="SECONDS",
        above=0,
    )
    silence_seconds: float = setting(
        30.0,
        "Heartbeat timeout: a parameter server that is silent for this long is replaced; with {cluster:external}, a "
        "worker as well. At most {lease_seconds}.",
        unit="SECONDS",
        above=0,
    )

    @property
    def patience_seconds(self) -> float:
        """Deadline of calls to a server: longer than it takes to detect and replace a server that is silent or does not
        answer."""
        return 60.0 + 2 * self.silence_seconds


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(NetworkOptions, RecoveryOptions):
    """How many processes, and who starts them."""

    kind: str = setting(  # a backend in cluster/registry.py
        "local", "The backend that starts the processes.", unit="CLUSTER", name="cluster", argument="kind"
    )
    num_workers: int = setting(
        1, "Number of workers.", unit="PROCESSES", minimum=1, because="Workers run the batches.", argument="num_workers"
    )
    autoscale: WorkerRange = setting(
        WorkerRange(),
        "Scale workers between MIN and MAX by measured throughput, e.g. 1..8. The job starts with {num_workers}, or "
        "with MIN.",
        unit="MIN..MAX",
        commands=TRAIN,
    )
    num_ps: int = setting(
        1,
        "Number of parameter servers.",
        unit="PROCESSES",
        minimum=1,
        because="Parameter servers hold the weights.",
        aliases=("num_ps_pods",),
        argument="num_ps",
    )
    dashboard: bool = setting(
        False,
        "Serve a live dashboard of the job to browsers on this machine, and print its address. Needs "
        "elasticcb[dashboard].",
        argument="dashboard",
    )
    kubernetes: KubernetesSettings = KubernetesSettings()
