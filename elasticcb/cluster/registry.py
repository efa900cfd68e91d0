"""The cluster backends by name. Installed packages can add backends as entry points of the group
`elasticcb.clusters`."""

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
from elasticcb.compute.registry import check_chosen_backend
from elasticcb.dashboard.beside import missing_libraries
from elasticcb.errors import UsageError, describe
from elasticcb.security.credentials import Access, token_of_environment
from elasticcb.security.tls import TLS, make_ca, tls_files
from elasticcb.settings import ClusterSettings, Given, JobSettings
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
    """All backends by name. An installed backend that can't be imported is skipped with a warning."""
    found = {backend.name: backend for backend in _BUILT_IN}
    for point in entry_points(group=GROUP):
        try:
            found.setdefault(point.name, point.load())
        except Exception as error:  # of third-party code
            warnings.warn(f"The cluster {point.name!r} ({point.value}) can't be used: {describe(error)}", stacklevel=2)
    return found


def backend_of(name: str) -> type[ClusterBackend]:
    """The backend with a name. Raises `UsageError` if there is none."""
    try:
        return backends()[name]
    except KeyError:
        known = ", ".join(repr(each) for each in backends())
        raise UsageError(f"There is no cluster {name!r}. Expected one of {known}.") from None


def contradictions(settings: JobSettings, given: Given) -> Iterator[str]:
    """Messages about settings that the job's cluster does not support."""
    kind = settings.cluster.kind
    backend = backends().get(kind)
    if backend is None:
        yield f"{given.shown('cluster')} is invalid. Expected one of {', '.join(map(repr, backends()))}."
        return
    if settings.cluster.autoscale.most and not backend.scales:
        yield f"{given.shown('autoscale')} is not supported with {given.shown('cluster')}. Remove one of the two."
    for other in backends().values():
        for name in sorted(other.settings) if other is not backend else ():
            if name in given:
                only = given.written(f"{{cluster:{other.name}}}")
                yield f"{given.shown(name)} applies only to {only}. Add that, or remove this."


def missing_for(cluster: ClusterSettings) -> Iterator[str]:
    """Messages about what this machine lacks for the settings of a cluster."""
    try:
        files = tls_files(dataclasses.asdict(cluster))
        if files is not None:
            TLS.load(files)
    except UsageError as error:
        yield str(error)
    if cluster.dashboard and (missing := missing_libraries()):
        yield missing
    try:
        check_chosen_backend()
    except UsageError as error:
        yield str(error)
    if cluster.kind in backends():
        yield from backends()[cluster.kind].missing(cluster)


def make_backend(context: BackendContext) -> ClusterBackend:
    """Creates the backend of a cluster; its token comes from the environment or is new, and so does its CA.

    Raises `UsageError` if the requested backend or TLS is not available.
    """
    check_chosen_backend()
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
            context.say(f"The processes of this job run without TLS: {INSECURE_RISK}.")
            return None
        return make_ca(context.directory)
    return TLS.load(files)
