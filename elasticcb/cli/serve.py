"""`elasticcb serve`: serves a model while it is trained, or goes back to an earlier version of it."""

from __future__ import annotations

import logging
import os
import posixpath
import sys
from typing import Any

import rich_click as click

from elasticcb.cli.command import CONTEXT
from elasticcb.errors import UsageError
from elasticcb.process.log_files import quiet_environment, setup_logging, without_native_messages
from elasticcb.security.credentials import is_loopback, token_of_environment
from elasticcb.storage.remote_files import is_url

TOKEN_VARIABLE = "ELASTICCB_SERVE_TOKEN"


@click.command(context_settings=CONTEXT)
@click.argument("folder", metavar="FOLDER")
@click.option(
    "--version", type=click.IntRange(0), metavar="V", help="Version to serve from now on.",
    show_default="that of the full export before the served version",
)  # fmt: skip
@click.option("--undo", is_flag=True, help="Serve the newest version again.")
def rollback(folder: str, version: int | None, undo: bool) -> None:
    """Go back to an earlier version of an exported model, in all processes that serve it.

    FOLDER is the folder or URL that PeriodicExport writes to, which keeps earlier versions for a while. Training and
    exporting continue; new versions are not served until --undo. Processes with a --version of their own ignore it.

    \b
    Examples:
      elasticcb serve rollback exports/clicks
      elasticcb serve rollback exports/clicks --version=1200
      elasticcb serve rollback exports/clicks --undo
    """
    from elasticcb.serving.exports import version_of, way_to
    from elasticcb.serving.served_folder import ServedFolder

    if undo and version is not None:
        raise UsageError("--undo and --version exclude each other. Give one of them.")
    exports = ServedFolder(folder)
    if undo:
        exports.names() or exports.current()  # which says that it is another folder
        exports.unpin()
        print(f"{exports.place} is served in its newest version again.")
        return
    served = exports.pinned()
    if served is None:
        served = exports.current().version
    if version is None:
        before = [name for name in exports.names() if name.startswith("full-") and version_of(name) < served]
        way = way_to(before)
        if not way:
            raise UsageError(f"{exports.place} keeps no full export before version {served}. Pass a --version.")
        version = version_of(way[-1])
    exports.pin(version)
    print(f"{exports.place} is served in version {version} from now on, after {served}, until --undo.")


class _WithRollback(click.RichCommand):
    """The command `serve`; with `rollback` as the first argument, that one."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == [str(rollback.name)]:
            return rollback.make_context(f"{info_name} {rollback.name}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_WithRollback, context_settings=CONTEXT)
@click.argument("folder", metavar="FOLDER")
@click.option("--name", metavar="NAME", help="Name of the model in addresses.", show_default="the name of FOLDER")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8501, show_default=True, metavar="PORT",
    help="Port of the REST API; 0: any that is free.",
)  # fmt: skip
@click.option(
    "--grpc_port", type=click.IntRange(0, 65535), metavar="PORT", show_default="no gRPC",
    help="Port of the gRPC API; 0: any that is free. Needs elasticcb[serve-grpc].",
)  # fmt: skip
@click.option(
    "--version", type=click.IntRange(0), metavar="V", show_default="the newest, or that of a rollback",
    help="Serve only this version.",
)  # fmt: skip
@click.option(
    "--poll", type=click.FloatRange(0.01), default=1.0, show_default=True, metavar="SECONDS",
    help="Time between two looks for a new version.",
)  # fmt: skip
@click.option(
    "--max_batch", type=click.IntRange(1), default=1024, show_default=True, metavar="EXAMPLES",
    help="Most examples of a batch of requests that wait at the same time; 1: each request runs by itself.",
)  # fmt: skip
@click.option(
    "--max_waiting", type=click.IntRange(1), default=1000, show_default=True, metavar="REQUESTS",
    help="More waiting requests than these are refused, with the status 429.",
)  # fmt: skip
@click.option(
    "--max_body", type=click.IntRange(1), default=16 << 20, show_default=True, metavar="BYTES",
    help="Larger requests are refused, with the status 413.",
)  # fmt: skip
@click.option(
    "--rows_on_disk", type=click.Path(exists=True, file_okay=False, writable=True), metavar="FOLDER",
    show_default="in memory", help="Keep the rows of embedding tables in files in this folder of a fast local disk.",
)  # fmt: skip
@click.option("--tls_cert", default="", metavar="FILE", help="PEM file with the server's certificate: serve by TLS.")
@click.option("--tls_key", default="", metavar="FILE", help="PEM file with its key, without a password.")
@click.option("--tls_ca", default="", metavar="FILE", help="Require clients to present a certificate of this CA.")
@click.option(
    "--insecure", is_flag=True,
    help=f"Let others than this machine send requests without TLS, or without the token in {TOKEN_VARIABLE}.",
)  # fmt: skip
def serve(
    folder: str,
    name: str | None,
    version: int | None,
    poll: float,
    rows_on_disk: str | None,
    insecure: bool,
    **options: Any,
) -> None:
    """Serve an exported model over HTTP, as TensorFlow Serving does, and follow its new versions.

    FOLDER is the folder or URL that PeriodicExport writes to. If it is empty, the command waits for the first export.
    With the environment variable ELASTICCB_SERVE_TOKEN, requests must carry this token. Ctrl-C and SIGTERM finish the
    requests that have arrived. Needs elasticcb[serve]. `elasticcb serve rollback --help` shows how to go back to an
    earlier version.

    \b
    Examples:
      elasticcb serve exports/clicks --port=8501
      curl -d '{"instances": [{"user": 7, "item": 42}]}' http://127.0.0.1:8501/v1/models/clicks:predict
    """
    os.environ.update(quiet_environment("INFO"))
    setup_logging("serve", "INFO", logging.StreamHandler(sys.stderr))
    with without_native_messages():
        from elasticcb.serving.served_model import ServedModel, check_every
        from elasticcb.serving.server import check_libraries, listener_at
        from elasticcb.serving.server import serve as run
        from elasticcb.serving.service import ServeOptions

    name = name or name_of(folder)
    given = ServeOptions(name=name, token=token_of_environment(TOKEN_VARIABLE), **options)
    check_libraries(given)
    _check(given, insecure)
    check_every(poll)
    listener = listener_at(given.host, given.port)
    with ServedModel(folder, version, wait=True, rows_on_disk=rows_on_disk) as model:
        run(model, listener, given, poll)


def name_of(folder: str) -> str:
    """The name of a model that is exported to a folder or URL."""
    return posixpath.basename(folder.rstrip("/") if is_url(folder) else os.path.abspath(folder))


def _check(options: Any, insecure: bool) -> None:
    """Raises `UsageError`."""
    if bool(options.tls_cert) != bool(options.tls_key) or (options.tls_ca and not options.tls_cert):
        raise UsageError("TLS needs both --tls_cert and --tls_key; --tls_ca is only used with them.")
    if not insecure and not is_loopback(options.host) and not (options.tls_cert and (options.token or options.tls_ca)):
        raise UsageError(
            f"--host={options.host} can be reached from other machines. Give --tls_cert and --tls_key, and the "
            f"environment variable {TOKEN_VARIABLE} or --tls_ca; or --insecure, if the network lets only those in who "
            "may send requests."
        )
