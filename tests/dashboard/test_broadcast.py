"""What browsers are sent of a job that is looked at."""

import asyncio

from elasticcb.dashboard import server
from elasticcb.dashboard.server import Broadcast


class Numbers:
    """In the place of a `JobView`: its news are numbers that go up."""

    def __init__(self):
        self.looks = 0

    def look(self):
        self.looks += 1

    def news(self):
        return self.looks

    everything = news


def test_a_browser_that_reads_nothing_is_ended_and_the_others_are_not(monkeypatch):
    monkeypatch.setattr(server, "_MOST_WAITING", 3)

    async def run() -> tuple[list[list[str]], list[str]]:
        job = Broadcast(Numbers())
        streams = [job.stream() for _ in range(8)]
        idle, *others = streams
        found = [[await anext(stream)] for stream in streams][1:]
        for _ in range(5):
            await job._look()
            for stream, messages in zip(others, found, strict=True):
                messages.append(await asyncio.wait_for(anext(stream), 10))
        return found, [message async for message in idle]

    others, idle = asyncio.run(run())
    assert others == [[f"data: {number}\n\n" for number in range(6)]] * 7
    assert idle == ["data: 2\n\n", "data: 3\n\n"]
