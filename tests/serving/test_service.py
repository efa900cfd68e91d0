"""Requests that wait together run as one batch, and each gets its own answer."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

from elasticcb.errors import UsageError
from elasticcb.serving import server, service
from elasticcb.serving.loaded_export import SIGNATURE
from elasticcb.serving.served_model import ServedModel
from elasticcb.serving.server import make_serving_app
from elasticcb.serving.service import Batcher, ModelService, ServeOptions, TooManyRequestsError
from made_exports import MadeExports

RUNNERS = service._RUNNERS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    exports = MadeExports(tmp_path_factory.mktemp("batches") / "exports")
    exports.train(1)
    exports.full(1)
    with ServedModel(exports.folder) as served:
        yield served


def request_of(item: int, examples: int = 1):
    return {
        "user": np.full((examples, 1), "ann", object),
        "item": np.stack([np.full(examples, item), np.arange(examples)], 1),
    }


def answers(model, requests, most_waiting=100, most_examples=1024):
    """The answers to requests that all wait before the first runs, or errors; and the sizes of the batches."""
    sizes = []

    async def run():
        options = ServeOptions("small", max_waiting=most_waiting, max_batch=most_examples)
        batcher = Batcher(model, options, SimpleNamespace(observe=sizes.append))
        with model._swapping.writing():  # predictions wait
            tasks = [asyncio.ensure_future(batcher.predict(request, SIGNATURE)) for request in requests]
            await asyncio.sleep(0)
        try:
            return await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            batcher.close()

    return asyncio.run(run()), sizes


def same(answer, expected):
    assert answer.version == expected.version
    for name, output in expected.items():
        np.testing.assert_allclose(answer[name], output, atol=1e-6)


def test_waiting_requests_are_one_batch_and_get_their_own_answers(model):
    requests = [request_of(number, 1 + number % 3) for number in range(12)]
    found, sizes = answers(model, requests)
    assert sorted(sizes) == sorted([1] * RUNNERS + [12 - RUNNERS])
    for request, answer in zip(requests, found, strict=True):
        same(answer, model.predict(request))


def test_batch_has_at_most_so_many_examples(model):
    found, sizes = answers(model, [request_of(number, 4) for number in range(RUNNERS + 5)], most_examples=8)
    assert sorted(sizes) == [1] * (RUNNERS + 1) + [2, 2]
    assert [len(answer["score"]) for answer in found] == [4] * (RUNNERS + 5)


def test_bad_request_in_a_batch_harms_only_itself(model):
    requests = [request_of(number) for number in range(8)]
    requests[5] = request_of(-1)
    found, _ = answers(model, requests)
    assert isinstance(found.pop(5), UsageError)
    del requests[5]
    for request, answer in zip(requests, found, strict=True):
        same(answer, model.predict(request))


def test_requests_beyond_those_that_may_wait_are_refused(model):
    found, _ = answers(model, [request_of(1)] * (RUNNERS + 5), most_waiting=3)
    refused = [isinstance(answer, TooManyRequestsError) for answer in found]
    assert refused == [False] * (RUNNERS + 3) + [True] * 2


def test_requests_that_can_not_be_joined_are_answered_one_by_one(model, monkeypatch):
    def out_of_memory(arrays):
        raise MemoryError

    monkeypatch.setattr(service, "np", SimpleNamespace(concatenate=out_of_memory))
    requests = [request_of(number) for number in range(RUNNERS + 3)]
    found, _ = answers(model, requests)
    for request, answer in zip(requests, found, strict=True):
        same(answer, model.predict(request))


def test_failed_request_by_grpc_is_logged_once(caplog):
    pytest.importorskip("tensorflow_serving", reason="it is not installed: pip install 'elasticcb[serve-grpc]'")
    from tensorflow_serving.apis import predict_pb2

    from elasticcb.serving.grpc_service import _PredictionService

    class Context:
        def invocation_metadata(self):
            return ()

        async def abort(self, code, text):
            raise ConnectionAbortedError(code.name)

    def check_token(token):
        raise RuntimeError("boom")

    noted = []
    failing = SimpleNamespace(options=SimpleNamespace(check_token=check_token), note=lambda *given: noted.append(given))
    with pytest.raises(ConnectionAbortedError, match="INTERNAL"):
        asyncio.run(_PredictionService(failing).Predict(predict_pb2.PredictRequest(), Context()))
    assert [status for _, status, _ in noted] == ["INTERNAL"]
    assert len([line for line in caplog.messages if "boom" in line]) == 1


def count(service, protocol):
    """How many requests were counted, by status."""
    samples = service.metrics.requests.collect()[0].samples
    named = [each for each in samples if each.name.endswith("_total") and each.labels["protocol"] == protocol]
    return {each.labels["status"]: each.value for each in named}


def test_each_request_is_counted_once_also_those_that_are_refused_or_given_up(model, monkeypatch):
    monkeypatch.setattr(server, "_LONG_SECONDS", 0.0)
    body = json.dumps({"inputs": {name: array.tolist() for name, array in request_of(1).items()}}).encode()
    whole, gone = {"type": "http.request", "body": body}, {"type": "http.disconnect"}
    part, huge = whole | {"body": b"{", "more_body": True}, whole | {"body": body * 9}
    path = "/v1/models/clicks:predict"

    async def ask(app, messages, path=path, method="POST", token=b"Bearer secret"):
        coming = iter(messages)

        async def receive():
            message = next(coming, None)
            return message or await asyncio.Event().wait()  # the client waits, too

        async def send(message):
            pass

        headers = [(b"authorization", token)]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
        await app(scope, receive, send)

    async def run():
        served = ModelService(model, ServeOptions("clicks", token="secret", max_body=len(body)))
        app = make_serving_app(served)
        try:
            await ask(app, [whole])
            await ask(app, [whole], token=b"")
            await ask(app, [whole], path="/v1/models/clicks/versions/7:predict")
            await ask(app, [], method="GET")
            await ask(app, [huge])
            await ask(app, [part, gone])
            await ask(app, [whole, gone])
            with model._swapping.writing():  # predictions wait
                task = asyncio.ensure_future(ask(app, [whole]))
                while not served._batcher._running:
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            await ask(app, [], path="/v1/models/clicks", method="GET")  # is no request to predict
        finally:
            served.close()
        return count(served, "rest")

    assert asyncio.run(run()) == {"200": 1, "401": 1, "404": 1, "405": 1, "413": 1, "499": 3}


def test_a_call_by_grpc_that_is_given_up_is_counted_as_cancelled(model):
    pytest.importorskip("tensorflow_serving", reason="it is not installed: pip install 'elasticcb[serve-grpc]'")
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    from elasticcb.serving.grpc_service import grpc_server

    inputs = {name: tf.make_tensor_proto(values) for name, values in request_of(1).items()}
    request = predict_pb2.PredictRequest(model_spec={"name": "clicks"}, inputs=inputs)

    async def run():
        served = ModelService(model, ServeOptions("clicks", grpc_port=0))
        try:
            async with grpc_server(served) as address, grpc.aio.insecure_channel(address) as channel:
                stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
                await stub.Predict(request)
                with model._swapping.writing():  # predictions wait
                    call = stub.Predict(request)
                    while not served._batcher._running:
                        await asyncio.sleep(0.01)
                    call.cancel()
                    while len(count(served, "grpc")) < 2:
                        await asyncio.sleep(0.01)
        finally:
            served.close()
        return count(served, "grpc")

    assert asyncio.run(run()) == {"OK": 1, "CANCELLED": 1}
