"""Runs a process by its description."""

from __future__ import annotations

from elasticcb.cluster.role import RoleProcess


def run_role(process: RoleProcess) -> None:
    """Runs a worker or a parameter server in this process until it ends.

    Raises `ConnectionLostError` if a server's port is taken.
    """
    if process.role == "worker":
        from elasticcb.roles.worker import run_worker

        run_worker(process)
    else:
        from elasticcb.roles.ps import run_ps

        run_ps(process)
