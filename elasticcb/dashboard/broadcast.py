"""Looks at a job at intervals, for all browsers that have its page open."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from elasticcb.dashboard.view import JobView

_LOOK_SECONDS = 1.0  # while somebody looks on
_IDLE_SECONDS = 10.0  # while nobody does: the master keeps the past meanwhile
_MOST_WAITING = 30  # messages for a browser, which reads none: it is to ask again for all


class Broadcast:
    """One look for all browsers.

    Args:
        view: of the job.
    """

    def __init__(self, view: JobView) -> None:
        self._view = view
        self._browsers: set[asyncio.Queue[str]] = set()
        self._lock = asyncio.Lock()  # of the view
        self._wake = asyncio.Event()
        self._ending = False

    async def run(self) -> None:
        """Looks until `end` is called, and once more then."""
        while not self._ending:
            await self._look()
            idle = None if self._view.over else _IDLE_SECONDS  # of a job that is over, nothing changes any more
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK_SECONDS if self._browsers else idle)
            self._wake.clear()
        await self._look()
        self._send("")
        self._view.close()

    def end(self) -> None:
        """Ends all streams, each with how the job is then."""
        self._ending = True
        self._wake.set()

    async def stream(self) -> AsyncIterator[str]:
        """What a browser is sent, as server-sent events: first everything, then what is new."""
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
            if browser.full():  # it is ended, and comes again
                self._browsers.discard(browser)
                browser.get_nowait()
                browser.put_nowait("")
            else:
                browser.put_nowait(message)


def _event(document: object) -> str:
    return f"data: {json.dumps(document, allow_nan=False)}\n\n"
