"""`elasticcb serve` as a real process, while a model is exported, and while things fail."""

from __future__ import annotations

import base64
import json
import signal
import socket
import ssl
import threading

import numpy as np
import pytest
import requests
from faults import Faults
from waiting import wait_until

from certificates import CA
from elasticcb.cli.main import main
from elasticcb.cli.serve import name_of
from elasticcb.errors import UsageError
from elasticcb.serving.served_model import ServedModel
from elasticcb.serving.server import listener_at, serve
from elasticcb.serving.service import ServeOptions
from made_exports import FEATURES, MadeExports
from serving_process import NAME, PREDICT, serving


@pytest.fixture
def exports(tmp_path):
    made = MadeExports(tmp_path / "exports")
    made.train(1)
    made.full(1)
    return made


def agree(served, exports):
    version, outputs = served.predict(FEATURES)
    assert version == exports.version
    for name, expected in zip(("score", "user_row", "item_row"), exports.expected(FEATURES), strict=True):
        np.testing.assert_allclose(outputs[name], expected, atol=1e-6)


def test_served_model_follows_training_through_faults_and_goes_back(exports, tmp_path, capsys):
    with serving(exports.folder, cwd=tmp_path) as served:
        agree(served, exports)
        for version in (2, 3):
            exports.train(version)
            exports.delta(version)
            wait_until(lambda version=version: served.health["version"] == version)
            agree(served, exports)
        assert served.metric("version") == 3
        assert served.metric("problem") == 0
        assert 0 <= served.metric("version_age_seconds") < 600
        assert served.metric('table_rows{table="items/embeddings"}') == len(exports.model.get_layer("items").rows()[0])
        assert served.metric('requests_total{protocol="rest",status="200"}') == 3
        before = served.predict(FEATURES)

        exports.train(4)
        name = exports.delta(4, current=False)
        path = exports.folder / name / "0.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        exports.publish(4)
        wait_until(lambda: "is damaged" in served.health["problem"])
        assert served.metric("problem") == 1
        assert served.get("/readyz").status_code == 200
        assert served.predict(FEATURES) == before
        served.process.process.kill()
    with serving(exports.folder, cwd=tmp_path) as served:  # after a kill, up to the damaged one
        assert served.predict(FEATURES) == before
        exports.full(5)
        wait_until(lambda: served.health["version"] == 5 and not served.health["problem"])
        agree(served, exports)

        assert main(["serve", "rollback", str(exports.folder), "--version=3"]) == 0
        wait_until(lambda: served.health["version"] == 3)
        assert served.predict(FEATURES) == before
        assert main(["serve", "rollback", str(exports.folder)]) == 0  # to the full export before
        wait_until(lambda: served.health["version"] == 1)
        exports.train(6)
        exports.delta(6)
        assert main(["serve", "rollback", str(exports.folder), "--undo"]) == 0
        wait_until(lambda: served.health["version"] == 6)
        agree(served, exports)
        assert main(["serve", "rollback", str(exports.folder), "--version=77"]) == 2
        assert "does not keep version 77. The newest that it keeps: 1, 2, 3, 4, 5, 6." in capsys.readouterr().err


def test_server_that_is_killed_while_it_swaps_versions_serves_the_newest_when_it_is_started_again(
    exports, tmp_path, monkeypatch
):
    faults = Faults(tmp_path / "faults")
    for name, value in faults.environment.items():
        monkeypatch.setenv(name, value)
    killed = faults.fail_at("serve", 0, "swaps versions")
    with serving(exports.folder, cwd=tmp_path):
        exports.train(2)
        exports.delta(2)
        wait_until(killed)
    with serving(exports.folder, cwd=tmp_path) as served:
        wait_until(lambda: served.health["version"] == 2)
        agree(served, exports)


def test_rest_api_is_that_of_tensorflow_serving(exports, tmp_path):
    with serving(exports.folder, cwd=tmp_path) as served:
        good = {"error_code": "OK", "error_message": ""}
        status = {"model_version_status": [{"version": "1", "state": "AVAILABLE", "status": good}]}
        assert served.get(f"/v1/models/{NAME}").json() == served.get(f"/v1/models/{NAME}/versions/1").json() == status
        metadata = served.get(f"/v1/models/{NAME}/metadata").json()
        assert metadata["model_spec"] == {"name": NAME, "signature_name": "", "version": "1"}
        signature = metadata["metadata"]["signature_def"]["signature_def"]["serving_default"]
        assert signature["method_name"] == "tensorflow/serving/predict"
        assert signature["inputs"]["item"]["dtype"] == "DT_INT64"
        sizes = [dim["size"] for dim in signature["inputs"]["item"]["tensor_shape"]["dim"]]
        assert sizes == ["-1", "2"]

        score, users, items = (output.tolist() for output in exports.expected(FEATURES))
        by_rows = {
            "signature_name": "serving_default",
            "instances": [
                {"user": [{"b64": base64.b64encode(user[0].encode()).decode()}], "item": item.tolist()}
                for user, item in zip(FEATURES["user"], FEATURES["item"], strict=True)
            ],
        }
        for path in (PREDICT, f"/v1/models/{NAME}/versions/1:predict"):
            answer = requests.post(f"{served.url}{path}", json=by_rows, timeout=60)
            assert answer.headers["Content-Type"] == "application/json"
            predictions = answer.json()["predictions"]
            for place, row in enumerate(predictions):
                assert row["score"] == pytest.approx(score[place], abs=1e-6)
                assert row["user_row"] == pytest.approx(users[place], abs=1e-6)
                assert row["item_row"] == pytest.approx(items[place], abs=1e-6)


def test_sigterm_lets_a_request_that_has_begun_end(exports, tmp_path):
    inputs = {"inputs": {name: values.tolist() for name, values in FEATURES.items()}}
    body = json.dumps(inputs).encode()
    head = f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    with serving(exports.folder, cwd=tmp_path) as served:
        with socket.create_connection(("127.0.0.1", served.port), 60) as connection:
            connection.sendall(head.encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 100")  # it waits for the body
            served.process.process.send_signal(signal.SIGTERM)

            def refuses():
                try:
                    socket.create_connection(("127.0.0.1", served.port), 60).close()
                except ConnectionRefusedError:
                    return True

            wait_until(refuses)
            connection.sendall(body)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert served.process.finish() == 0


def test_ctrl_c_ends_the_server_well(exports, tmp_path):
    with serving(exports.folder, cwd=tmp_path) as served:
        served.process.interrupt()
        assert served.process.finish() == 0


def test_no_client_sees_parts_of_two_versions(exports, tmp_path):
    exports.set_all(1)
    exports.full(2)
    one, seen, wrong, done = {"user": [["ann"]], "item": [[3, 4]]}, set(), [], threading.Event()

    def ask(served):
        with requests.Session() as session:
            while not done.is_set():
                answer = session.post(f"{served.url}{PREDICT}", json={"inputs": one}, timeout=60)
                version = int(answer.headers["X-Model-Version"])
                values = {value for output in answer.json()["outputs"].values() for row in output for value in row}
                seen.add(version)
                if values != {version - 1}:
                    wrong.append((version, values))

    with serving(exports.folder, cwd=tmp_path) as served:
        clients = [threading.Thread(target=ask, args=[served]) for _ in range(8)]
        for client in clients:
            client.start()
        for version in range(3, 23):
            exports.set_all(version - 1, ids=(3, 4, version))
            exports.delta(version)
            wait_until(lambda version=version: version in seen)
        done.set()
        for client in clients:
            client.join()
    assert not wrong


def test_server_waits_for_the_first_export(tmp_path):
    with serving(tmp_path / "exports", cwd=tmp_path) as served:
        assert served.get("/readyz").status_code == 503
        assert served.get(f"/v1/models/{NAME}").status_code == 503
        assert "has no current.json" in served.health["problem"]
        exports = MadeExports(tmp_path / "exports")
        exports.full(1)
        wait_until(lambda: served.get("/readyz").status_code == 200)
        agree(served, exports)


def test_token_and_tls_keep_others_out(exports, tmp_path, monkeypatch):
    ca = CA(tmp_path)
    own, other = ca.issue("server"), ca.issue("client")
    flags = [f"--tls_cert={own.tls_cert}", f"--tls_key={own.tls_key}", f"--tls_ca={own.tls_ca}"]
    monkeypatch.setenv("ELASTICCB_SERVE_TOKEN", "secret")
    with serving(exports.folder, *flags, "--host=0.0.0.0", cwd=tmp_path) as served:
        served.url = f"https://127.0.0.1:{served.port}"
        given = {"verify": other.tls_ca, "cert": (other.tls_cert, other.tls_key)}
        with_token = {"headers": {"Authorization": "Bearer secret"}}
        assert served.predict(FEATURES, **given, **with_token)[0] == 1
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = served.get(f"/v1/models/{NAME}", headers=headers, **given)
            assert answer.status_code == 401
            assert "Authorization: Bearer" in answer.json()["error"]
        assert served.get("/readyz", **given).status_code == 200
        assert is_refused(ssl.create_default_context(cafile=other.tls_ca), served.port)  # without a certificate


def is_refused(context, port):
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 60) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as tunnel,
        ):
            tunnel.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
            return not tunnel.recv(1)
    except OSError:
        return True


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host=0.0.0.0"], "can be reached from other machines"),
        (["--tls_cert=cert.pem"], "both --tls_cert and --tls_key"),
        (["--port=70000"], "70000"),
        (["--host=192.0.2.1", "--insecure"], "can't be served at 192.0.2.1"),
        (["--port=0", "--poll=inf"], "The time between two looks is inf s"),
    ],
)
def test_wrong_flags_are_refused(tmp_path, flags, says, capsys):
    assert main(["serve", str(tmp_path), *flags]) == 2
    assert says in capsys.readouterr().err


def test_rollback_of_a_folder_without_exports_is_refused(tmp_path, capsys):
    for flag in ("--undo", "--version=1"):
        assert main(["serve", "rollback", str(tmp_path), flag]) == 1
        assert "nothing was exported there yet" in capsys.readouterr().err


def test_the_name_of_a_model_is_that_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {name_of(folder) for folder in (".", f"{tmp_path}/", f"s3://models/{tmp_path.name}/")} == {tmp_path.name}


def test_servers_that_start_at_the_same_time_do_not_share_a_port(exports):
    with ServedModel(exports.folder) as model, listener_at("127.0.0.1", 0) as first:
        second = listener_at("127.0.0.1", first.getsockname()[1])
        first.listen()
        with pytest.raises(UsageError, match="Choose another --port"):
            serve(model, second, ServeOptions(NAME), 1.0)


def test_grpc_api_is_that_of_tensorflow_serving(exports, tmp_path):
    pytest.importorskip("tensorflow_serving", reason="it is not installed: pip install 'elasticcb[serve-grpc]'")
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis import get_model_metadata_pb2, predict_pb2, prediction_service_pb2_grpc

    with serving(exports.folder, "--grpc_port=0", cwd=tmp_path) as served:
        (line,) = (line for line in served.process.lines if line.startswith("gRPC at "))
        taken = line.rpartition(":")[2]
        assert main(["serve", str(exports.folder), "--port=0", f"--grpc_port={taken}"]) == 2
        with grpc.insecure_channel(line.split()[-1]) as channel:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)

            def request(**features):
                inputs = {name: tf.make_tensor_proto(values) for name, values in {**FEATURES, **features}.items()}
                return predict_pb2.PredictRequest(model_spec={"name": NAME}, inputs=inputs)

            answer = stub.Predict(request(), timeout=60)
            assert answer.model_spec.version.value == 1
            for name, expected in zip(("score", "user_row", "item_row"), exports.expected(FEATURES), strict=True):
                np.testing.assert_allclose(tf.make_ndarray(answer.outputs[name]), expected, atol=1e-6)
            filtered = request()
            filtered.output_filter.append("score")
            assert list(stub.Predict(filtered, timeout=60).outputs) == ["score"]

            def refused(bad):
                with pytest.raises(grpc.RpcError) as error:
                    stub.Predict(bad, timeout=60)
                return error.value.code().name, error.value.details()

            other, old, unfit = request(), request(), request(color=1)
            other.model_spec.name, old.model_spec.version.value = "other", 7
            assert refused(other) == ("NOT_FOUND", f"There is no model 'other' here. Expected '{NAME}'.")
            assert refused(old)[0] == "NOT_FOUND"
            assert refused(unfit)[0] == "INVALID_ARGUMENT"
            assert refused(request(item=np.ones((3, 2), np.int32)))[1].startswith(
                "The input 'item' has the dtype int32"
            )
            assert "ids out of range" in refused(request(item=-np.ones((3, 2), np.int64)))[1]
            unknown, huge = request(), request()
            unknown.inputs["item"].dtype = 0
            huge.inputs["item"].tensor_shape.dim[0].size = 10**12
            assert refused(unknown) == ("INVALID_ARGUMENT", "The input 'item' has the dtype 0. Expected int64.")
            assert refused(huge)[0] == "RESOURCE_EXHAUSTED"

            asked = get_model_metadata_pb2.GetModelMetadataRequest(
                model_spec={"name": NAME}, metadata_field=["signature_def"]
            )
            signatures = get_model_metadata_pb2.SignatureDefMap()
            stub.GetModelMetadata(asked, timeout=60).metadata["signature_def"].Unpack(signatures)
            assert set(signatures.signature_def["serving_default"].inputs) == {"user", "item"}
