"""Broken messages to the health service; `python tests/fuzzing/fuzz.py` sends more of them."""

from elasticcb.rpc.server import HealthServer
from health_calls import HealthFuzzer


def test_broken_messages_are_refused_and_the_health_service_goes_on(caplog):
    health = HealthServer("127.0.0.1", 0, "elasticcb.Master", lambda: True)
    fuzzer = HealthFuzzer(0, health.address)
    try:
        fuzzer.run(2_000)
        assert fuzzer.still_serves()
    finally:
        fuzzer.close()
        health.stop()
    assert not fuzzer.surprises
    assert min(fuzzer.codes[name] for name in ("OK", "NOT_FOUND", "INVALID_ARGUMENT", "UNIMPLEMENTED")) > 50
    assert fuzzer.codes["RESOURCE_EXHAUSTED"] > 10
    assert not caplog.records  # a stranger does not fill the log
