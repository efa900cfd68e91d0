"""The end of a pod's log, where the stream does not tell it."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from elasticcb.cluster.kubernetes import api as api_module
from elasticcb.cluster.kubernetes.api import KubernetesAPI

RUNS = {"containerID": "a", "state": {"running": {}}}


@pytest.fixture
def api_server(tmp_path, monkeypatch):
    """An API server with one pod, whose log stays open after one line; `state` holds the pod."""
    state, done = {"pod": RUNS}, threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            if "/log" in self.path:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"9\r\none line\n\r\n")
                self.wfile.flush()
                done.wait(60)
                self.close_connection = True
                return
            pod = state["pod"]
            body = json.dumps({"status": {"containerStatuses": [pod]}} if pod else {"message": "not found"}).encode()
            self.send_response(200 if pod else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr(api_module, "_QUIET_SECONDS", 0.05)
    yield state
    done.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "after",
    [{"containerID": "a", "state": {"terminated": {}}}, {"containerID": "b", "state": {"running": {}}}, None],
    ids=["ended", "another container", "the pod is gone"],
)
def test_a_log_ends_with_its_container_though_its_stream_stays_open(api_server, after):
    lines = KubernetesAPI("default").follow_log("job")
    assert next(lines) == "one line"
    api_server["pod"] = after
    assert list(lines) == []


def test_a_log_that_is_quiet_goes_on_while_its_container_runs(api_server):
    lines = KubernetesAPI("default").follow_log("job")
    assert next(lines) == "one line"
    ended = threading.Event()
    threading.Thread(target=lambda: (list(lines), ended.set()), daemon=True).start()
    assert not ended.wait(1)  # twenty times as long as after which it is looked into
    api_server["pod"] = None
    assert ended.wait(30)
