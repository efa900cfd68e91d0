"""The description of a process, and the commands that read it again."""

import pytest

from elasticcb.cli.run import ps, worker
from elasticcb.cluster.role import RoleProcess
from elasticcb.security.credentials import Access


@pytest.mark.parametrize(
    ("command", "process"),
    [
        (worker, RoleProcess(role="worker", master="10.0.0.1:50001", index=3, parent_pid=7)),
        (worker, RoleProcess(role="worker", master="[::1]:50001")),
        (ps, RoleProcess(role="ps", master="m:1", index=0, host="10.0.0.2", port=50051, health_port=0)),
    ],
)
def test_a_command_reads_what_the_description_of_its_process_writes(command, process):
    role, *arguments = process.arguments
    assert role == command.name
    read = command.make_context(role, list(arguments)).params
    described = {name: value for name, value in vars(process).items() if name in read}
    assert {"master", "index", "parent_pid"} <= described.keys()
    assert {
        name: read[name] if read[name] is not None else getattr(RoleProcess, name) for name in described
    } == described


def test_the_token_goes_by_the_environment_alone():
    process = RoleProcess(role="ps", master="m:1", access=Access("secret"))
    assert "secret" not in " ".join(process.arguments)
    assert "secret" not in repr(process)
    assert process.environment("INFO")["ELASTICCB_JOB_TOKEN"] == "secret"


def test_a_worker_has_no_flags_of_servers():
    given = RoleProcess(role="worker", master="m:1", host="10.0.0.2", port=1, health_port=2).arguments
    assert given == ("worker", "--master", "m:1", "--insecure")


def test_a_process_is_told_to_do_without_tls_where_its_master_has_a_port_and_none():
    assert "--insecure" not in RoleProcess(role="ps", master="unix:/tmp/sockets/1").arguments
    assert "--insecure" in RoleProcess(role="ps", master="m:1").arguments
