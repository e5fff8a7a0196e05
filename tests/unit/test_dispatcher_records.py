"""The end of a request reaches its client and its counters, whatever happens to those who learn from its record."""

from __future__ import annotations

import logging
from collections import deque
from types import SimpleNamespace

import pytest
from fake_cluster import Cluster

from cluster.engine.simulation.virtual_time import run_virtual as run
from cluster.goodput.metrics import Metrics
from cluster.messages import Outcome, RequestRecord, Slo


def breaks(record: RequestRecord) -> None:
    raise ZeroDivisionError("float division by zero")


def test_a_record_that_teaching_chokes_on_ends_its_request_and_the_rest_of_the_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        c = Cluster(prefill=1, decode=1)
        c.placing.observe = breaks  # type: ignore[method-assign]
        for _ in range(30):
            c.send()
        await c.settle()
        assert c.check() == {Outcome.DONE: 30}

    with caplog.at_level(logging.ERROR, logger="router.dispatcher"):
        run(main())
    assert "the record of r0 could not be taken in" in caplog.text


def test_what_takes_records_in_cannot_end_the_step_either() -> None:
    async def main() -> None:
        c = Cluster(prefill=1, decode=1)
        keep, learnt = c.records.append, []

        def keep_and_break(record: RequestRecord) -> None:
            keep(record)
            breaks(record)

        c.dispatcher._on_record = keep_and_break
        c.placing.observe = learnt.append  # type: ignore[method-assign]
        for _ in range(30):
            c.send()
        await c.settle()
        assert c.check() == {Outcome.DONE: 30}
        assert len(learnt) == 30

    run(main())


def test_a_router_counts_a_request_before_it_learns_from_it() -> None:
    from router.app import Router

    metrics = Metrics(Slo(1.0, 0.1))
    metrics.start(prompt_tokens=10)
    router = SimpleNamespace(
        times=SimpleNamespace(observe=breaks), _client_ids={"r": "c"}, _records=deque(), metrics=metrics, _tracing=None
    )
    record = RequestRecord("r", Outcome.DONE, Slo(1.0, 0.1), 0.0, 1.0, prompt_tokens=10)
    with pytest.raises(ZeroDivisionError):
        Router._on_record(router, record)
    assert "pdserve_requests_running 0.0" in metrics.render().decode()
    assert [kept["client_request_id"] for kept in router._records] == ["c"]
