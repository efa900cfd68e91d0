"""What a server answers to requests that are not good, and that nobody else notices."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import requests

from made_exports import FEATURES, MadeExports
from serving_process import NAME, PREDICT, body_of, serving

ONE = {"user": ["ann"], "item": [3, 4]}
MOST_BYTES = 100_000


def inputs(**changed):
    return {"inputs": {"user": [["ann"]], "item": [[3, 4]], **changed}}


BODIES = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"\xff\xfe{}", "not JSON"),
    (b"[" * 90_000, "not JSON"),
    (b"[]", 'either "instances"'),
    (b"{}", 'either "instances"'),
    ({"instances": [ONE], **inputs()}, 'either "instances"'),
    ({"instances": []}, "at least one example"),
    ({"instances": ONE}, 'Expected "instances" to be a list'),
    ({"instances": [1]}, "instance 0 is not an object with the keys 'item', 'user'"),
    ({"instances": [ONE, 1]}, "instance 1 is not an object"),
    ({"instances": [{"user": ["ann"]}]}, "instance 0 has the keys 'user'"),
    ({"instances": [ONE, {**ONE, "color": 1}]}, "instance 1 has the keys"),
    ({"inputs": 3}, "an object with the keys 'item', 'user'"),
    ({"inputs": {"user": [["ann"]]}}, "Received the inputs 'user'"),
    (inputs(color=[1]), "Received the inputs 'color', 'item', 'user'"),
    (inputs(item=[[1, "x"]]), "'item' contains values that are not int64"),
    (inputs(item=[[1, 2.5]]), "'item' contains values that are not int64"),
    (inputs(item=[[True, False]]), "'item' contains values that are not int64"),
    (inputs(item=[[1, True]]), "'item' contains values that are not int64"),
    (inputs(item=[[1, None]]), "'item' contains values that are not int64"),
    (inputs(item=[[1, {"b64": ""}]]), "'item' contains values that are not int64"),
    (inputs(item=[[1, 2**70]]), "'item' contains values that are not int64"),
    (inputs(item=[[2**63, 2**63]]), "that int64 can't represent"),
    (inputs(item=[[1], [2, 3]]), "lists have different lengths"),
    (inputs(item=[[1, 2, 3]]), "'item' has the shape [1, 3]. Expected int64 of the shape [None, 2]"),
    (inputs(item=3), "'item' has the shape []"),
    (inputs(item=[]), "'item' has the shape [0]"),
    (inputs(item=[[-1, 2]]), "ids out of range"),
    (inputs(item=[[1, 2], [3, 4]]), "can't use these features"),
    (inputs(user=[[7]]), "'user' contains values that are not strings"),
    (inputs(user=[["ann", ["bob"]]]), "'user' "),
    (inputs(user=[[{"b64": "*"}]]), "'user' contains an invalid string"),
    (inputs(user=[[{"b64": 7}]]), "'user' contains an invalid string"),
    (inputs(user=[["\ud800"]]), "'user' contains an invalid string"),
    ({**inputs(), "signature_name": "other"}, "no signature 'other'"),
    ({**inputs(), "signature_name": 3}, "signature_name is 3"),
]
PATHS = [
    ("POST", "/v1/models/other:predict", 404, "no model 'other'"),
    ("POST", f"/v1/models/{NAME}/versions/99:predict", 404, "Version 99 is not served"),
    ("POST", f"/v1/models/{NAME}/versions/x:predict", 404, "nothing at"),
    ("POST", f"/v1/models/{NAME}:classify", 404, "nothing at"),
    ("POST", f"/v1/models/{NAME}", 405, "Expected GET"),
    ("GET", PREDICT, 405, "Expected POST"),
    ("DELETE", PREDICT, 405, "Method Not Allowed"),
    ("GET", "/v2/models", 404, "Not Found"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A process, to which a client that does nothing wrong sends requests all the time."""
    folder = tmp_path_factory.mktemp("bad")
    exports = MadeExports(folder / "exports")
    exports.train(1)
    exports.full(1)
    expected, answers, ends = exports.expected(FEATURES), [], threading.Event()

    def ask():
        while not ends.is_set():
            answers.append(served.predict(FEATURES))

    with serving(exports.folder, f"--max_body={MOST_BYTES}", cwd=folder) as served:
        client = threading.Thread(target=ask)
        client.start()
        yield served
        ends.set()
        client.join()
        assert served.health["problem"] == ""
    assert answers
    for version, outputs in answers:
        assert version == 1
        for name, values in zip(("score", "user_row", "item_row"), expected, strict=True):
            np.testing.assert_allclose(outputs[name], values, atol=1e-6)


@pytest.mark.parametrize(("body", "says"), BODIES, ids=itertools.count())
def test_bad_body_is_refused_in_words(server, body, says):
    answer = requests.post(f"{server.url}{PREDICT}", body_of(body), timeout=60)
    assert answer.status_code == 400, answer.text
    assert list(answer.json()) == ["error"]
    assert says in answer.json()["error"]


@pytest.mark.parametrize(("method", "path", "status", "says"), PATHS)
def test_bad_address_is_refused_in_words(server, method, path, status, says):
    answer = requests.request(method, f"{server.url}{path}", data=body_of(inputs()), timeout=60)
    assert answer.status_code == status
    assert says in answer.json()["error"]


def pieces():
    for _ in range(MOST_BYTES // 1_000 + 1):
        yield b" " * 1_000


@pytest.mark.parametrize("body", [b" " * (MOST_BYTES + 1), pieces], ids=["of a known length", "of an unknown length"])
def test_huge_body_is_refused(server, body):
    answer = requests.post(f"{server.url}{PREDICT}", body() if callable(body) else body, timeout=60)
    assert (answer.status_code, list(answer.json())) == (413, ["error"])
    assert f"larger than {MOST_BYTES:,} bytes" in answer.text
