"""What this machine must have for the settings of a cluster; command line and `Cluster` look before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from elasticcb.cluster.ray import check_ray
from elasticcb.errors import UsageError
from elasticcb.security.certificates import check_installed
from elasticcb.security.tls import TLS, tls_files
from elasticcb.settings import ClusterKind, ClusterSettings


def missing_for(cluster: ClusterSettings) -> Iterator[str]:
    """What is not there, or can't be used, in words."""
    try:
        files = tls_files(dataclasses.asdict(cluster))
        if files is not None:
            TLS.load(files)
        elif cluster.tls:
            check_installed()
    except UsageError as error:
        yield str(error)
    if cluster.kind is ClusterKind.RAY:
        try:
            check_ray(cluster.ray_address)
        except UsageError as error:
            yield str(error)
