"""Serves the dashboard of a job over HTTP to browsers on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import inspect
import json
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from elasticcb.clients.live_tables import tables_of
from elasticcb.clients.local_job import log_lines, master_of, scale_job, stop_job
from elasticcb.dashboard.beside import missing_libraries
from elasticcb.dashboard.broadcast import Broadcast
from elasticcb.dashboard.view import JobView, token_of
from elasticcb.errors import ElasticCBError, UsageError

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

_STATIC = Path(__file__).parent / "static"
_HOST = "127.0.0.1"
_MOST_LINES = 2_000  # of a log
_TOP = 5  # number of most frequently looked-up ids per table
_STOP_SECONDS = 120.0  # seconds for a job to end
_GRACE_SECONDS = 3  # seconds for streams to end
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def serve(folder: Path, port: int, say: Callable[[str], None]) -> None:
    """Serves the dashboard of a job until SIGINT or SIGTERM.

    Raises `UsageError` if there is no such job, the port is taken, or a library is missing.
    """
    if missing := missing_libraries():
        raise UsageError(missing)
    import uvicorn

    key = key_of(token_of(folder))
    listener = _listener(port)
    broadcast = Broadcast(JobView(folder))
    config = uvicorn.Config(
        make_app(folder, key, broadcast),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        server_header=False,
    )
    say(f"http://{_HOST}:{listener.getsockname()[1]}/#key={key}")
    with listener:
        asyncio.run(_serve(config, listener, broadcast))


async def _serve(config: uvicorn.Config, listener: socket.socket, broadcast: Broadcast) -> None:
    import uvicorn

    loop = asyncio.get_running_loop()

    class PageServer(uvicorn.Server):
        def handle_exit(self, sig: int, frame: object) -> None:
            # Not at once: streams must end with a last message, otherwise the server would wait for them.
            loop.call_soon_threadsafe(broadcast.end)

    server = PageServer(config)
    looks, serving = asyncio.create_task(broadcast.run()), asyncio.create_task(server.serve([listener]))
    await asyncio.wait([looks, serving], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    broadcast.end()
    await asyncio.gather(looks, serving)


def _listener(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"The dashboard can't be served at {_HOST}:{port}: {error.strerror}. Choose another --port, or 0 for any "
            "free port."
        ) from None
    return listener


def make_app(folder: Path, key: str, broadcast: Broadcast) -> Starlette:
    """Creates the application. Static files need no key; data of the job does."""
    from starlette.applications import Starlette
    from starlette.responses import FileResponse, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    async def page(request: Request) -> Response:
        return FileResponse(_STATIC / "index.html")

    async def stream(request: Request) -> Response:
        return StreamingResponse(broadcast.stream(), media_type="text/event-stream")

    # These wait for the master: they run in threads.
    def log(request: Request) -> dict[str, Any]:
        process, lines = request.query_params.get("process", "master"), request.query_params.get("lines", "300")
        if not re.fullmatch(r"[a-z]+(-\d+)?", process) or not re.fullmatch(r"\d{1,9}", lines):
            raise UsageError(f"There is no log of {process!r} with {lines} lines.")
        return {"lines": [*log_lines(folder, process, min(int(lines) or 1, _MOST_LINES), follow=False)]}

    def tables(request: Request) -> dict[str, Any]:
        with master_of(folder) as master:
            return dataclasses.asdict(tables_of(str(folder), master.tables(_TOP), _TOP))

    def scale(request: Request, workers: int | None = None, ps: int | None = None) -> dict[str, Any]:
        return {"done": " ".join(scale_job(folder, _count(workers), _count(ps), on_wait=lambda waits_for: None))}

    def stop(request: Request) -> dict[str, Any]:
        return {"done": stop_job(folder, _STOP_SECONDS)}

    routes = [
        Route("/", page),
        Mount("/static", StaticFiles(directory=_STATIC)),
        Route("/api/stream", stream),
        Route("/api/log", _answering(log)),
        Route("/api/tables", _answering(tables)),
        Route("/api/scale", _answering(scale), methods=["POST"]),
        Route("/api/stop", _answering(stop), methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    app.add_middleware(_Guard, key=key)
    return app


class _Guard:
    """ASGI middleware that refuses requests without the key and from other sites.

    Args:
        app: handles all other requests.
        key: key for everything below /api.
    """

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from starlette.responses import JSONResponse

        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        why = refusal(headers, self._key if scope["path"].startswith("/api/") else None)

        async def send_safely(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        app = JSONResponse({"error": why}, status_code=403) if why else self._app
        await app(scope, receive, send_safely)


def _answering(function: Callable[..., dict[str, Any]]) -> Callable[[Request], Awaitable[JSONResponse]]:
    """An endpoint for a blocking function; its keyword arguments are the fields of the body, a JSON object."""

    async def endpoint(request: Request) -> JSONResponse:
        from starlette.responses import JSONResponse

        try:
            body = json.loads(await request.body() or b"{}") if request.method == "POST" else {}
            if not isinstance(body, dict):
                raise ValueError(f"{body!r} is not a JSON object")
            inspect.signature(function).bind(request, **body)
        except (TypeError, ValueError, RecursionError) as error:  # the last: nested too deeply
            return JSONResponse({"error": f"The request can't be read: {error}"}, status_code=400)
        try:
            return JSONResponse(await asyncio.to_thread(function, request, **body))
        except ElasticCBError as error:
            return JSONResponse({"error": str(error)}, status_code=409)

    return endpoint


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{value!r} is invalid. Expected a whole number of at least 1.")
    return value


_PURPOSE = b"elasticcb dashboard"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def key_of(token: str) -> str:
    """The key for the dashboard of the job with this token; without a token, a random key."""
    if not token:
        return secrets.token_hex(16)
    return hmac.new(token.encode(), _PURPOSE, hashlib.sha256).hexdigest()[:32]


def refusal(headers: Mapping[str, str], key: str | None) -> str:
    """Why a request is refused; "": it is accepted.

    Args:
        headers: by lowercase name.
        key: key that it must carry; None: no key, the resource is public.
    """
    host = headers.get("host", "")
    if not _is_loopback(host):  # another site's name may resolve to this machine: DNS rebinding
        return f"This server accepts only addresses of this machine, not {host!r}. Open http://127.0.0.1 with its port."
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return "The request comes from another site."
    if key is None:
        return ""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), key.encode()):
        return ""
    return (
        "The key is missing or wrong. Open the complete address that the dashboard printed, including the part after #."
    )


def _is_loopback(host: str) -> bool:
    try:
        return urlsplit(f"//{host}").hostname in _LOOPBACK
    except ValueError:  # it is not a host
        return False
