"""Polls a job at intervals, for all browsers that have its dashboard open."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from elasticcb.dashboard.view import JobView

_LOOK_SECONDS = 1.0  # while a browser is connected
_IDLE_SECONDS = 10.0  # while no browser is connected: the master keeps the history meanwhile
_MOST_WAITING = 30  # queued messages for a browser that does not read; beyond that, it must reload everything


class Broadcast:
    """Polls once for all browsers."""

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
