"""The cluster backends by name. Installed packages add theirs as entry points of the group `elasticcb.clusters`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points

from elasticcb.clients.running_master import running_master
from elasticcb.cluster.base import BackendContext, ClusterBackend
from elasticcb.cluster.external import ExternalCluster
from elasticcb.cluster.inprocess import InProcessCluster
from elasticcb.cluster.kubernetes.backend import KubernetesCluster
from elasticcb.cluster.local.backend import LocalCluster
from elasticcb.cluster.ray.backend import RayCluster
from elasticcb.dashboard.beside import missing_libraries
from elasticcb.errors import UsageError, describe
from elasticcb.security.credentials import Access, token_of_environment
from elasticcb.security.tls import TLS, make_ca, tls_files
from elasticcb.settings import ClusterSettings, JobSettings
from elasticcb.settings.checks import Said
from elasticcb.settings.cluster import INSECURE_RISK

GROUP = "elasticcb.clusters"
_BUILT_IN: tuple[type[ClusterBackend], ...] = (
    LocalCluster,
    InProcessCluster,
    ExternalCluster,
    KubernetesCluster,
    RayCluster,
)


@functools.cache
def backends() -> Mapping[str, type[ClusterBackend]]:
    """All of them by name. An installed one that can't be imported is left out, with a warning."""
    found = {backend.name: backend for backend in _BUILT_IN}
    for point in entry_points(group=GROUP):
        try:
            found.setdefault(point.name, point.load())
        except Exception as error:  # of somebody else's code
            warnings.warn(f"The cluster {point.name!r} ({point.value}) can't be used: {describe(error)}", stacklevel=2)
    return found


def backend_of(name: str) -> type[ClusterBackend]:
    """The backend of a name. Raises `UsageError` when there is none."""
    try:
        return backends()[name]
    except KeyError:
        known = ", ".join(repr(each) for each in backends())
        raise UsageError(f"There is no cluster {name!r}. Expected one of {known}.") from None


def contradictions(settings: JobSettings, said: Said) -> Iterator[str]:
    """What of the settings of a job its cluster can't do, in words."""
    kind = settings.cluster.kind
    backend = backends().get(kind)
    if backend is None:
        yield f"{said.with_value('cluster.kind')} can't be. Expected one of {', '.join(map(repr, backends()))}."
        return
    if settings.cluster.autoscale.most and not backend.scales:
        yield (
            f"{said.with_value('cluster.autoscale')} starts and ends processes of this machine, which "
            f"{said.as_given('cluster.kind', kind)} leaves to others. Leave one of them out."
        )
    for name, other in backends().items():
        for path in sorted(other.settings) if name != kind else ():
            if path in said:
                only = said.as_given("cluster.kind", name)
                yield f"{said.with_value(path)} has a meaning with {only} only. Add that, or leave this out."


def missing_for(cluster: ClusterSettings) -> Iterator[str]:
    """What this machine lacks for the settings of a cluster, in words."""
    try:
        files = tls_files(dataclasses.asdict(cluster))
        if files is not None:
            TLS.load(files)
    except UsageError as error:
        yield str(error)
    if cluster.dashboard and (missing := missing_libraries()):
        yield missing
    if cluster.kind in backends():
        yield from backends()[cluster.kind].missing(cluster)


def make_backend(context: BackendContext) -> ClusterBackend:
    """Where the processes of a cluster run; its token is that of the environment, or a new one, and so is its CA.

    Raises `UsageError` when the backend, or TLS, is asked for and can't be had.
    """
    backend = backend_of(context.settings.kind).make(context)
    if backend.taken_over:
        with contextlib.suppress(UsageError):
            backend.access = running_master(context.directory).access
            return backend
    backend.access = Access(token_of_environment() or secrets.token_hex(16), _tls(context))
    return backend


def _tls(context: BackendContext) -> TLS | None:
    cluster = context.settings
    files = tls_files(dataclasses.asdict(cluster))
    if files is None:
        has_ports = cluster.tls or cluster.host or cluster.port or not backend_of(cluster.kind).one_machine
        if not has_ports:
            return None
        if cluster.insecure:
            context.say(f"The processes of this job do without TLS (--insecure): {INSECURE_RISK}.")
            return None
        return make_ca(context.directory)
    return TLS.load(files)
