"""Serves a model by TensorFlow Serving's APIs: REST, and gRPC if its stubs are installed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elasticcb.errors import CheckpointError, UsageError
from elasticcb.process.log_files import print_line
from elasticcb.process.system import missing_module
from elasticcb.rpc.services import LIVE_PATH, READY_PATH
from elasticcb.serving.rest_format import answer_to, read_request
from elasticcb.serving.served_model import ServedModel
from elasticcb.serving.service import ModelService, ServeOptions, TooLargeError, UnknownModelError, status_of

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response

_PATH = re.compile(r"/v1/models/(?P<name>[^/:]+)(?:/versions/(?P<version>\d{1,18}))?(?P<what>:predict|/metadata|)")
_IN_THREAD_BYTES = 64 << 10  # larger bodies are read in another thread, so that others are answered meanwhile
_GONE = 499  # what is counted for a request whose client does not wait for the answer; others do the same
_LONG_SECONDS = 0.05  # nobody gives up earlier; to ask takes 0.06 ms
_GRACE_SECONDS = 30  # for running requests when the server ends


def make_serving_app(service: ModelService) -> Starlette:
    """The REST API, health checks and metrics."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    model, options = service.model, service.options

    def checked(request: HTTPRequest, found: re.Match[str] | None) -> tuple[str, int | None]:
        """What is asked for, and of which version."""
        options.check_token(request.headers.get("authorization", ""))
        if found is None:
            raise UnknownModelError(f"There is nothing at {request.scope['path']}. Expected /v1/models/{options.name}.")
        version = None if found["version"] is None else int(found["version"])
        service.check_target(found["name"], version)
        return found["what"], version

    async def endpoint(request: HTTPRequest) -> Response:
        found = _PATH.fullmatch(request.scope["path"])  # `request.url` takes longer
        if found is not None and found["what"] == ":predict":
            return await predict(request, found)
        try:
            what, _ = checked(request, found)
            if request.method != "GET":
                return JSONResponse({"error": "Expected GET, or POST to :predict."}, 405, {"Allow": "GET"})
            return JSONResponse(_metadata(service) if what else _status(model))
        except Exception as error:
            return refused(error)

    async def predict(request: HTTPRequest, found: re.Match[str]) -> Response:
        began, status = time.perf_counter(), _GONE
        try:
            _, version = checked(request, found)
            if request.method != "POST":
                status = 405
                return JSONResponse({"error": "Expected POST."}, status, {"Allow": "POST"})
            body = await _body_of(request, options.max_body)
            began = time.perf_counter()
            parsed = await _in_thread_if(len(body) > _IN_THREAD_BYTES, read_request, body, model)
            answer = await service.predict(parsed.features, parsed.signature, version)
            large = sum(output.nbytes for output in answer.values()) > _IN_THREAD_BYTES
            content = await _in_thread_if(large, answer_to, parsed, answer)
            took_long = time.perf_counter() - began > _LONG_SECONDS
            if not (took_long and await request.is_disconnected()):
                status = 200
            return Response(content, 200, {"X-Model-Version": str(answer.version)}, "application/json")
        except ClientDisconnect:
            return Response(status_code=status)  # to nobody
        except Exception as error:
            answered = refused(error)
            status = answered.status_code
            return answered
        finally:
            service.note("rest", str(status), began)

    def refused(error: Exception) -> Response:
        status, _, text = status_of(error)
        extra = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 413: {"Connection": "close"}}
        return JSONResponse({"error": text}, status, extra.get(status))

    async def live(request: HTTPRequest) -> Response:
        return JSONResponse({"version": model.version, "age_seconds": model.age, "problem": model.problem})

    async def ready(request: HTTPRequest) -> Response:
        return JSONResponse({"ready": model.version is not None}, 503 if model.version is None else 200)

    async def metrics(request: HTTPRequest) -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def not_found(request: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": f"{error.detail}: {request.url.path}"}, error.status_code, error.headers)

    routes = [
        Route(LIVE_PATH, live),
        Route(READY_PATH, ready),
        Route("/metrics", metrics),
        Route("/v1/models/{rest:path}", endpoint, methods=["GET", "POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: not_found})


async def _body_of(request: HTTPRequest, limit: int) -> bytes:
    """Raises `TooLargeError`; what is a little too large is read to its end, since a client may listen only then."""
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            body += chunk
        elif size > 2 * limit:
            break
    if size > limit:
        raise TooLargeError(f"The body is larger than {limit:,} bytes (--max_body). Send fewer examples.")
    return bytes(body)


async def _in_thread_if(large: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.to_thread(function, *arguments) if large else function(*arguments)


def _status(model: ServedModel) -> dict[str, Any]:
    if model.version is None:
        raise CheckpointError(f"No model is served yet. {model.problem}")
    good = {"error_code": "OK", "error_message": ""}
    return {"model_version_status": [{"version": str(model.version), "state": "AVAILABLE", "status": good}]}


def _metadata(service: ModelService) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    signatures = {
        name: MessageToDict(signature, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        for name, signature in service.model.signature_defs.items()
    }
    spec = {"name": service.options.name, "signature_name": "", "version": str(service.model.version)}
    return {"model_spec": spec, "metadata": {"signature_def": {"signature_def": signatures}}}


def check_libraries(options: ServeOptions) -> None:
    """Raises `UsageError` for what must be installed."""
    missing = missing_module("Serving", "serve", "starlette", "uvicorn")
    if options.grpc_port is not None:
        missing = missing or missing_module("Serving", "serve-grpc", "tensorflow_serving")
    if missing:
        raise UsageError(missing)


def listener_at(host: str, port: int) -> socket.socket:
    """Raises `UsageError` if the port is taken."""
    # asyncio sets TCP_NODELAY only for sockets that name TCP; without it, answers can wait 40 ms for the client.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, proto=socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        raise _taken(host, port, error) from None
    return listener


def _taken(host: str, port: int, error: OSError) -> UsageError:
    return UsageError(
        f"The model can't be served at {host}:{port}: {error.strerror}. Choose another --port, or 0 for any that is "
        "free."
    )


def serve(model: ServedModel, listener: socket.socket, options: ServeOptions, poll: float) -> None:
    """Serves a model, and follows its versions, until SIGINT or SIGTERM; then finishes the requests that it has. It
    answers for its health while the first version is loaded, and prints its addresses then.

    Args:
        poll: as `every` of `ServedModel.follow`.
    """
    with listener, contextlib.suppress(KeyboardInterrupt):  # before the server listens to signals
        asyncio.run(_serve(model, listener, options, poll))


async def _serve(model: ServedModel, listener: socket.socket, options: ServeOptions, poll: float) -> None:
    import uvicorn

    class EndingServer(uvicorn.Server):
        def handle_exit(self, sig: int, frame: object) -> None:
            # Uvicorn would raise the signal again at the end, so that the exit code would not be 0.
            self.force_exit = self.should_exit
            self.should_exit = True

    service = ModelService(model, options)
    try:
        config = uvicorn.Config(
            make_serving_app(service),
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            ssl_certfile=options.tls_cert or None,
            ssl_keyfile=options.tls_key or None,
            ssl_ca_certs=options.tls_ca or None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if options.tls_ca else ssl.CERT_NONE,
        )
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        async with contextlib.AsyncExitStack() as until_end:
            if options.grpc_port is not None:
                from elasticcb.serving.grpc_service import grpc_server

                print_line(f"gRPC at {await until_end.enter_async_context(grpc_server(service))}")
            try:
                listener.listen()  # who reads the address may connect
            except OSError as error:  # another, which started at the same time
                raise _taken(host, port, error) from None
            address = f"{'https' if options.tls_cert else 'http'}://{shown}:{port}/v1/models/{options.name}"
            model.follow(poll, lambda: print_line(address))
            await EndingServer(config).serve([listener])
    finally:
        service.close()
