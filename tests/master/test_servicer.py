"""When the servers of a job can't be asked what their tables hold, without any process."""

from __future__ import annotations

import pytest
from master_state import settings_of, state_of

from elasticcb.cluster.external import ExternalCluster
from elasticcb.errors import UsageError
from elasticcb.master import servicer
from elasticcb.master.master import Master
from elasticcb.master.members import ServedCluster
from elasticcb.sharding.partition import ServerPlace

SETTINGS = settings_of(num_workers=2, num_ps=2)


@pytest.fixture
def master():
    master = Master(SETTINGS.cluster, ExternalCluster(lambda line: None), lambda line: None)
    master.server.begin_job(SETTINGS)
    yield master
    master.stop()


@pytest.mark.parametrize("id", [None, 42])
def test_who_asks_before_during_and_after_the_loss_of_a_server_is_told_why_there_is_no_answer(master, monkeypatch, id):
    monkeypatch.setattr(servicer, "_PATIENCE_SECONDS", 0.1)
    state = state_of(master)
    with pytest.raises(UsageError, match="the job is starting"):
        servicer.tables_of(master.server, 5, id, 0.0)
    state.cluster = ServedCluster([ServerPlace("127.0.0.1:1", 1), ServerPlace("127.0.0.1:2", 2)], [], False)
    with pytest.raises(UsageError, match=r"may just have been lost: .* Try again"):
        servicer.tables_of(master.server, 5, id, 0.0)
    state.lost_ps[1] = 0.0
    with pytest.raises(UsageError, match=r"parameter server 1 was lost .* Try again in a few seconds"):
        servicer.tables_of(master.server, 5, id, 0.0)
    state.over = True
    with pytest.raises(UsageError, match="the job is over"):
        servicer.tables_of(master.server, 5, id, 0.0)
