"""The `elasticcb serve` command as a real process, and requests to it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import requests

from jobs import JobProcess

NAME = "clicks"
PREDICT = f"/v1/models/{NAME}:predict"


class Serving:
    """A running `elasticcb serve`."""

    def __init__(self, folder: Path | str, *flags: str, cwd: Path) -> None:
        flags = (f"--name={NAME}", "--port=0", "--poll=0.02", *flags)
        self.process = JobProcess("serve", str(folder), *flags, cwd=cwd)
        line = self.process.wait_for_line(rf"^https?://.*/{NAME}$")
        self.url = line.strip().partition("/v1/")[0]
        self.port = int(self.url.rpartition(":")[2])

    def predict(self, features: dict[str, Any], **given: Any) -> tuple[int, dict[str, Any]]:
        """The version, and the outputs."""
        inputs = {name: np.asarray(value).tolist() for name, value in features.items()}
        answer = requests.post(f"{self.url}{PREDICT}", json={"inputs": inputs}, timeout=60, **given)
        assert answer.status_code == 200, answer.text
        return int(answer.headers["X-Model-Version"]), answer.json()["outputs"]

    def get(self, path: str, **given: Any) -> requests.Response:
        return requests.get(f"{self.url}{path}", timeout=60, **given)

    @property
    def health(self) -> dict[str, Any]:
        return self.get("/healthz").json()

    def metric(self, name: str) -> float:
        found = re.search(rf"^elasticcb_serving_{re.escape(name)} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        assert found, name
        return float(found[1])


@contextlib.contextmanager
def serving(folder: Path | str, *flags: str, cwd: Path) -> Iterator[Serving]:
    """Serves meanwhile; the process must end well, unless it was killed."""
    served = Serving(folder, *flags, cwd=cwd)
    try:
        yield served
    finally:
        served.process.process.send_signal(signal.SIGTERM)
        code = served.process.finish()
    assert code in (0, -9), served.process.output


def body_of(document: Any) -> bytes:
    return document if isinstance(document, bytes) else json.dumps(document).encode()
