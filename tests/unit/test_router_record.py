"""What a record says of how its request ended, made by the one function that both drivers use."""

from __future__ import annotations

import pytest
from fake_cluster import Cluster

from cluster.config import LimitsConfig
from cluster.engine.simulation.virtual_time import run_virtual as run
from cluster.errors import Cancelled, PdserveError, TenantOverBudget
from cluster.goodput.accounting import is_excused, is_missed, is_refused, miss_stage
from cluster.messages import Outcome, Request, RequestRecord, Slo, Stage
from router.lifecycle import Lifecycle
from router.record import Measured, make_record

SLO = Slo(ttft_s=0.5, tpot_s=0.05)


def record(outcome: Outcome, error: PdserveError | None, now: float, **measured) -> RequestRecord:
    request = Request("r", 100.0, 500, 400, SLO)
    return make_record(request, None, Lifecycle(request, LimitsConfig()), Measured(**measured), outcome, error, now)


@pytest.mark.parametrize(
    ("left_s", "tokens", "tpot_s", "excused"),
    [
        (20.0, 10, 2.0, False),  # one token every two seconds
        (20.0, 1, 0.0, False),  # one token, then nothing
        (5.0, 100, 0.05, True),  # at the limit
        (5.4, 100, 0.05, True),  # its leaving takes a moment
        (5.8, 100, 0.05, False),  # nothing for more than half a second
        (0.4, 1, 0.0, True),
    ],
)
def test_a_client_that_leaves_a_stalled_stream_is_not_excused(left_s, tokens, tpot_s, excused) -> None:
    left = {"output_tokens": tokens, "ttft_s": 0.2, "tpot_s": tpot_s, "stage_s": {Stage.PREFILL_COMPUTE: 0.2}}
    r = record(Outcome.CANCELLED, Cancelled("the client left"), 100.2 + left_s, **left)
    assert (is_excused(r), is_missed(r)) == (excused, not excused)
    assert miss_stage(r) is (None if excused else Stage.DECODE_STEP)
    if tpot_s <= SLO.tpot_s:
        assert r.deadline_passed != excused
    assert not record(Outcome.DONE, None, 100.2 + left_s, **left).deadline_passed


def test_before_the_first_token_the_first_deadline_alone_counts() -> None:
    assert is_excused(record(Outcome.CANCELLED, Cancelled("the client left"), 100.3))
    assert is_missed(record(Outcome.CANCELLED, Cancelled("the client left"), 100.6))


def test_a_record_has_the_status_of_its_error() -> None:
    r = record(Outcome.REJECTED, TenantOverBudget("beyond its tokens per second"), 100.0)
    assert r.status == 429
    assert is_refused(r)
    assert record(Outcome.DONE, None, 101.0, ttft_s=0.1).status is None


def test_what_a_router_ends_itself_has_failed() -> None:
    """Nobody left: a client whose router goes has missed its answer."""

    async def main() -> None:
        c = Cluster(prefill=1, decode=1)
        jobs = [c.send(max_tokens=100) for _ in range(5)]
        c.dispatcher.end_all("the router is shutting down")
        assert [job.ends[0][0] for job in jobs] == [Outcome.FAILED] * 5
        assert [(r.outcome, r.error) for r in c.records] == [(Outcome.FAILED, "the router is shutting down")] * 5
        assert all(map(is_missed, c.records))

    run(main())


def test_a_client_that_leaves_by_itself_has_not_failed() -> None:
    async def main() -> None:
        c = Cluster(prefill=1, decode=1)
        job = c.send(max_tokens=100)
        c.dispatcher.client_left("r0")
        assert job.ends[0][0] is Outcome.CANCELLED
        assert is_excused(c.records[0])
        await c.settle()

    run(main())
