"""Workers and parameter servers that the user or another system starts."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from elasticcb.cluster.base import BackendContext, ClusterBackend, Exit
from elasticcb.cluster.role import RoleProcess
from elasticcb.compute.registry import OF_SERVERS, VARIABLE, backend_of_role
from elasticcb.security.credentials import TOKEN_VARIABLE, token_of_environment
from elasticcb.storage import durable

_TOKEN_FILE = "token"


class ExternalCluster(ClusterBackend):
    """Prints the commands to run, and waits for the processes.

    Args:
        directory: the job's folder. A file with the token, readable only by its owner, is written there unless the user
            chose the token.
        made_ca: the CA file was created for this job, and is not the user's own.
    """

    name = "external"
    summary = "you start the processes, anywhere"
    watches = False

    def __init__(self, say: Callable[[str], None], directory: str = "", made_ca: bool = False) -> None:
        self._say, self._made_ca = say, made_ca
        self._folder = Path(directory)
        self._file = self._folder / _TOKEN_FILE
        self._written = False
        self._told = False  # what processes need on other machines

    @classmethod
    def make(cls, context: BackendContext) -> ExternalCluster:
        return cls(context.say, context.directory, not context.settings.tls_ca)

    def start(self, role: str, index: int, master_address: str) -> None:
        process = RoleProcess(role=role, master=master_address, index=index, access=self.access)
        token = self._where_token_is()
        if not self._told:
            self._told = True
            self._tell_what_to_copy()
        self._say(f"Waiting for: {command_line(process, token)}")

    def _tell_what_to_copy(self) -> None:
        files = [self._file] if self._written else []
        files += [ca.parent for ca in self._ca_of_job()]
        if not files:
            return
        folder, names = shlex.quote(str(self._folder)), shlex.join(map(str, files))
        self._say(
            "To run the commands below on another machine, first copy the files that they read to the same path: ssh "
            f"MACHINE mkdir -pm 700 {folder} && scp -pr {names} MACHINE:{folder}/"
        )
        self._say("Add --host=ADDRESS to `elasticcb ps` there: the address at which other machines reach it.")

    def _ca_of_job(self) -> list[Path]:
        tls = self.access.tls
        return [Path(tls.files.tls_ca)] if tls is not None and self._made_ca else []

    def _where_token_is(self) -> str:
        """For a shell. The token itself is never shown."""
        if self.access.token == token_of_environment():
            return f"${TOKEN_VARIABLE}"
        if not self._written:
            durable.write(self._file, self.access.token.encode("ascii"))
            self._written = True
        return f'"$(cat {shlex.quote(str(self._file))})"'

    def poll(self) -> list[Exit]:
        return []

    def kill(self, role: str, index: int) -> None:
        self._say(f"{role} {index} does not answer; stop it on its machine.")

    def stop(self, grace_seconds: float) -> None:
        """The processes exit by themselves when the master reports the end of the job, or is gone."""
        secrets = [self._file] if self._written else []
        for file in (*secrets, *self._ca_of_job()):  # another run uses other paths
            file.unlink(missing_ok=True)


def command_line(process: RoleProcess, token: str) -> str:
    """The shell command that starts a process; `token` is the shell text for the token."""
    chosen = backend_of_role(process.role, process.keras_backend)
    keras = "" if chosen == OF_SERVERS else f"{VARIABLE}={chosen} "
    return f"{keras}{TOKEN_VARIABLE}={token} elasticcb {shlex.join(process.arguments)}"
