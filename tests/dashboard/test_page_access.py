"""Who may ask the server of a job's page, and for what."""

import asyncio
import json

import pytest

from elasticcb.dashboard.server import Broadcast, JobView, key_of, make_app, refusal
from elasticcb.settings import STATUS_FILE

KEY = key_of("the job's token")
HERE = {"host": "127.0.0.1:8787"}
WITH_KEY = {**HERE, "authorization": f"Bearer {KEY}"}


def test_the_key_follows_from_the_token_and_is_another_one_each_time_where_there_is_none():
    assert KEY == key_of("the job's token") != key_of("another token")
    assert "token" not in KEY
    assert key_of("") != key_of("")


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        (WITH_KEY, ""),
        ({**WITH_KEY, "host": "localhost:1"}, ""),
        ({**WITH_KEY, "host": "[::1]:1"}, ""),
        ({**WITH_KEY, "origin": "http://127.0.0.1:8787"}, ""),
        (HERE, "key is missing or wrong"),
        ({**HERE, "authorization": f"Bearer {KEY}x"}, "key is missing or wrong"),
        ({**HERE, "authorization": f"Basic {KEY}"}, "key is missing or wrong"),
        ({**HERE, "authorization": "Bearer ü"}, "key is missing or wrong"),
        ({**WITH_KEY, "host": "evil.example:8787"}, "addresses of this machine"),
        ({**WITH_KEY, "host": "127.0.0.1.evil.example"}, "addresses of this machine"),
        ({**WITH_KEY, "host": ""}, "addresses of this machine"),
        ({**WITH_KEY, "host": "[::1"}, "addresses of this machine"),
        ({**WITH_KEY, "origin": "http://evil.example"}, "from another site"),
        ({**WITH_KEY, "origin": "http://127.0.0.1:9999"}, "from another site"),
        ({**WITH_KEY, "origin": "null"}, "from another site"),
    ],
)
def test_a_request_is_refused_without_the_key_and_from_elsewhere(headers, why):
    assert why in refusal(headers, KEY)
    assert bool(refusal(headers, KEY)) is bool(why)


def ask(app, method: str, path: str, headers: dict, body: bytes = b"") -> tuple[int, bytes]:
    """Calls an ASGI application as a server does."""
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    sent, given = [], [{"type": "http.request", "body": body}]

    async def receive():
        return given.pop() if given else await asyncio.Event().wait()  # the other side stays

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture
def app(tmp_path):
    """Of a job that has ended."""
    (tmp_path / STATUS_FILE).write_text(json.dumps({"phase": "done", "error": ""}))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.log").write_text("one\ntwo\n")
    return make_app(tmp_path, KEY, Broadcast(JobView(tmp_path)))


def test_files_of_the_page_need_no_key_and_all_else_does(app):
    assert ask(app, "GET", "/", HERE)[0] == 200
    assert ask(app, "GET", "/static/page.js", HERE)[0] == 200
    assert ask(app, "GET", "/static/../server.py", HERE)[0] == 404
    assert ask(app, "GET", "/", {"host": "evil.example"})[0] == 403
    for method, path in (
        ("GET", "/api/stream"),
        ("GET", "/api/log"),
        ("GET", "/api/tables"),
        ("POST", "/api/scale"),
        ("POST", "/api/stop"),
        ("GET", "/api/nothing"),
    ):
        assert ask(app, method, path, HERE)[0] == 403


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/api/stop", b"{}", 409, "The job has ended"),
        ("/api/scale", b'{"workers": 0}', 409, "Expected a whole number of at least 1"),
        ("/api/scale", b'{"workers": true}', 409, "Expected a whole number of at least 1"),
        ("/api/scale", b'{"cats": 3}', 400, "can't be read"),
        ("/api/scale", b"[]", 400, "is not a JSON object"),
        ("/api/scale", b"{", 400, "can't be read"),
        ("/api/scale", b"[" * 100_000, 400, "can't be read"),
    ],
)
def test_what_can_not_be_done_is_told(app, path, body, status, says):
    answer = ask(app, "POST", path, WITH_KEY, body)
    assert answer[0] == status
    assert says in json.loads(answer[1])["error"]
    assert ask(app, "GET", path, WITH_KEY)[0] == 405


def test_the_log_of_a_process_is_shown_and_no_other_file(app):
    assert json.loads(ask(app, "GET", "/api/log?process=worker-0&lines=1", WITH_KEY)[1]) == {"lines": ["two\n"]}
    for asked in ("process=../status", "process=worker-0/../x", "process=worker-1", "lines=-1", "lines=many"):
        assert ask(app, "GET", f"/api/log?{asked}", WITH_KEY)[0] == 409
