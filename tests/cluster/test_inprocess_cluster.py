import threading

from elasticcb.cluster.inprocess import InProcessCluster


def polled(cluster):
    while not (exits := cluster.poll()):
        pass
    return exits


def test_a_thread_that_fails_is_reported_once_with_its_traceback():
    def fail(process):
        raise ValueError(f"no data at {process.master}")

    cluster = InProcessCluster(fail)
    cluster.start("worker", 2, "master:1")
    (exit,) = polled(cluster)
    assert (exit.role, exit.index, exit.failed) == ("worker", 2, True)
    assert exit.reason == "ValueError: no data at master:1"
    assert "in fail" in cluster.log_tail("worker", 2)
    assert cluster.poll() == []


def test_the_end_of_a_thread_whose_place_was_taken_is_not_reported():
    first_may_end, second_may_end = threading.Event(), threading.Event()
    waits = iter([first_may_end, second_may_end])
    cluster = InProcessCluster(lambda *_: next(waits).wait())
    cluster.start("worker", 0, "")
    (first,) = [thread for thread in threading.enumerate() if thread.name == "worker-0"]
    cluster.start("worker", 0, "")
    first_may_end.set()
    first.join()
    assert cluster.poll() == []
    second_may_end.set()
    (exit,) = polled(cluster)
    assert (exit.reason, exit.failed) == ("it returned", False)


def test_the_end_of_the_cluster_waits_for_those_that_are_about_to_end():
    never, ended = threading.Event(), []

    def run(*_):
        never.wait(0.2)  # what it does last takes a while
        ended.append("worker")

    cluster = InProcessCluster(run)
    cluster.start("worker", 0, "")
    cluster.stop(60.0)
    assert ended == ["worker"]
