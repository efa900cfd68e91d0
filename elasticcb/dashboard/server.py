"""Serves the dashboard of a job over HTTP to browsers on this machine: pages, and a stream of changes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import inspect
import json
import re
import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from elasticcb.checkpoint.table_report import tables_of
from elasticcb.clients.history import History
from elasticcb.clients.local_job import how_it_ended, log_lines, lost_master, master_of, scale_job, stop_job
from elasticcb.clients.master import MasterClient
from elasticcb.clients.running_master import RunningMaster, running_master
from elasticcb.dashboard.beside import missing_libraries
from elasticcb.errors import ConnectionLostError, ElasticCBError, UsageError
from elasticcb.settings import HISTORY_FILE
from elasticcb.storage import durable

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
_LOOK_SECONDS = 1.0  # while a browser is connected
_IDLE_SECONDS = 10.0  # while no browser is connected: the master keeps the history meanwhile
_MOST_WAITING = 30  # queued messages for a browser that does not read; beyond that, it must reload everything
_PATIENCE_SECONDS = 3.0  # seconds for an answer of the master
_RATES = 60  # per worker, one per poll


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
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # so that asyncio sets TCP_NODELAY
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


class Broadcast:
    """Polls a job at intervals, once for all browsers that have its dashboard open."""

    def __init__(self, view: JobView) -> None:
        self._view = view
        self._browsers: set[asyncio.Queue[str]] = set()
        self._lock = asyncio.Lock()  # of the view
        self._wake = asyncio.Event()
        self._ending = False

    async def run(self) -> None:
        """Polls until `end` is called, and then once more."""
        while not self._ending:
            await self._look()
            idle = None if self._view.over else _IDLE_SECONDS  # an ended job does not change any more
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK_SECONDS if self._browsers else idle)
            self._wake.clear()
        await self._look()
        self._send("")
        self._view.close()

    def end(self) -> None:
        """Ends all streams, each with the final state."""
        self._ending = True
        self._wake.set()

    async def stream(self) -> AsyncIterator[str]:
        """Server-sent events for a browser: first everything, then changes."""
        messages: asyncio.Queue[str] = asyncio.Queue(_MOST_WAITING)
        async with self._lock:
            self._browsers.add(messages)
            message = _event(self._view.everything())
        self._wake.set()
        try:
            while message:
                yield message
                message = await messages.get()
        finally:
            self._browsers.discard(messages)

    async def _look(self) -> None:
        async with self._lock:
            await asyncio.to_thread(self._view.look)
            news = self._view.news()
            if self._browsers:
                self._send(_event(news))

    def _send(self, message: str) -> None:
        for browser in [*self._browsers]:
            if browser.full():  # it is closed, and the browser reconnects
                self._browsers.discard(browser)
                browser.get_nowait()
                browser.put_nowait("")
            else:
                browser.put_nowait(message)


def _event(document: object) -> str:
    return f"data: {json.dumps(document, allow_nan=False)}\n\n"


class JobView:
    """Polls a job. Only one thread at a time may call it.

    Attributes:
        status: as in `elasticcb status --json`; None: unknown yet.
        trouble: why `status` is outdated; "": it is current.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.status: dict[str, Any] | None = None
        self.over = False
        self.trouble = ""
        self._history = History()
        self._running: list[Any] = []  # tasks
        self._rates: dict[int, deque[float]] = {}  # records per second of workers, by index
        self._known = (0.0, 0)  # id of the master's history, and the last entry read
        self._shown = 0  # entries that `news` has returned
        self._kept_as = (0, 0, 0)  # inode, time and size of the history file that was read last
        self._master: tuple[RunningMaster, MasterClient] | None = None

    def look(self) -> None:
        """Updates the view."""
        try:
            ended = how_it_ended(self.folder)
            if ended is None:
                self.status, past = self._ask()
                self._note_rates(self.status)
            else:
                self.close()
                self.status, past = ended, self._kept()
            self.over, self.trouble = ended is not None, ""
            self._take_in(past)
        except ElasticCBError as error:
            self.trouble = str(error)

    def news(self) -> dict[str, Any]:
        """The changes since the last call, as JSON values."""
        found = self._told(self._history.after(self._shown))
        self._shown = self._history.number
        return found

    def everything(self) -> dict[str, Any]:
        """Everything up to the last `news`, as JSON values."""
        rates = {place: list(rates) for place, rates in self._rates.items()}
        return {**self._told(self._history.after(0)), "rates": rates, "whole": True}

    def close(self) -> None:
        """Closes the connection to the master."""
        if self._master is not None:
            self._master[1].close()
            self._master = None

    def _told(self, past: dict[str, Any]) -> dict[str, Any]:
        logs = sorted(path.stem for path in (self.folder / "logs").glob("*.log"))
        state = {"status": self.status, "over": self.over, "trouble": self.trouble, "running": self._running}
        return {**state, "past": past, "logs": logs, "folder": str(self.folder)}

    def _ask(self) -> tuple[dict[str, Any], dict[str, Any]]:
        client = self._connected()
        try:
            status, past = client.status_and_past(self._known[1])
            if past["run"] != self._known[0] and self._known[1]:  # another master replaced it, or it is another job
                status, past = client.status_and_past(0)
            return status, past
        except ConnectionLostError as error:
            self.close()
            raise lost_master(self.folder, error) from None

    def _connected(self) -> MasterClient:
        found = running_master(self.folder)
        if self._master is None or self._master[0] != found:
            self.close()
            self._master = found, MasterClient(found.address, _PATIENCE_SECONDS, found.access)
        return self._master[1]

    def _kept(self) -> dict[str, Any]:
        """The history that the master left in the folder; {}: it was read before."""
        path = self.folder / HISTORY_FILE
        with contextlib.suppress(OSError, ValueError):
            status = path.stat()
            before, self._kept_as = self._kept_as, (status.st_ino, status.st_mtime_ns, status.st_size)
            if self._kept_as != before:
                return durable.read_document(path)
        return {}

    def _take_in(self, past: dict[str, Any]) -> None:
        before, known = self._known
        run = past.get("run", before)
        with contextlib.suppress(TypeError, ValueError):  # of another release
            if run == before:
                self._history.extend(past, after=known)
            else:  # a resumed job has its complete history, of which the earlier part is known here
                self._history.extend(past, since=run if known else 0.0)
        self._known = run, past.get("number", known)
        self._running = [] if self.over else past.get("running", [])

    def _note_rates(self, status: dict[str, Any]) -> None:
        for process in status["processes"]:
            if process["role"] == "worker":
                rates = self._rates.setdefault(process["index"], deque(maxlen=_RATES))
                rates.append(process["records_per_second"] or 0.0)


def token_of(folder: Path) -> str:
    """The token of the job in a folder; "": it has ended. Raises `UsageError` if there is no such job."""
    return "" if how_it_ended(folder) is not None else running_master(folder).token
