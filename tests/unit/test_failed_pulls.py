"""A pull that fails ends in no error (`on_failure: recompute`): the real dispatcher over simulated engines.

Kinds: decode silently repeats the prefill; full hit on decode: nothing to pull.
"""

from __future__ import annotations

from typing import Any

import pytest
from virtual_pools import VirtualPools

from cluster.config import parse
from cluster.engine.simulation.virtual_time import run_virtual
from cluster.messages import Outcome, Path
from cluster.workload.arrival import Arrival

CONFIG = parse(
    {
        "engine": {"kind": "simulated", "simulated": {"kv_blocks": 2000}},
        "pools": {"prefill": {"replicas": {"min": 1, "max": 1}}, "decode": {"replicas": {"min": 1, "max": 1}}},
        # In these pools nobody sends heartbeats.
        "router": {"limits": {"silent_s": 3600, "stall_s": 3600}, "placement": {"conditional": False}},
    }
)
PAIR = ("prefill-0", "decode-0")


def prompts(*numbers: int, tokens: int = 200, every_s: float = 0.3) -> list[Arrival]:
    return [Arrival(i * every_s, ((number, tokens),), 20) for i, number in enumerate(numbers)]


def run(arrivals: list[Arrival], failing: int) -> tuple[VirtualPools, dict[str, Any]]:
    found: dict[str, Any] = {}

    async def main() -> VirtualPools:
        pools = VirtualPools(CONFIG)
        await pools.start()
        pools.engines["decode-0"].faults.failing_transfers = failing
        await pools.run(arrivals)
        prefill = pools.engines["prefill-0"]
        found["prefill blocks"] = prefill.scheduler.kv.used_blocks
        found["decode computed"] = pools.engines["decode-0"].scheduler.counters.computed_prompt_tokens
        for engine in pools.engines.values():
            await engine.shutdown()
        return pools

    pools = run_virtual(main())
    assert {r.outcome for r in pools.records} == {Outcome.DONE}
    return pools, found


def test_a_failed_pull_is_booked_as_what_it_is_and_pins_nothing() -> None:
    pools, found = run(prompts(1, 2), failing=1)
    leases = pools.dispatcher.leases.counters()
    assert (leases.granted, leases.pulled, leases.released, leases.expired) == (2, 1, 1, 0)
    assert found == {"prefill blocks": 0, "decode computed": 201}
    assert pools.dispatcher.members.last_failure == {"prefill-0": "TransferFailed"}
    assert pools.dispatcher.health.pairs.opened == 0, "the next one went well"


def test_a_pair_whose_pulls_fail_is_given_up_for_a_while() -> None:
    pools, _ = run(prompts(*range(30)), failing=1000)
    assert pools.dispatcher.health.pairs.opened >= 2
    paths = [r.path for r in pools.records]
    assert paths.count(Path.SPLIT) < 10
    assert paths[:2] == [Path.SPLIT, Path.SPLIT]
    assert pools.dispatcher.leases.counters().pulled == 0


@pytest.mark.parametrize("tokens", [1, 16, 65, 200])
def test_what_needs_no_pull_is_no_failure(tokens: int) -> None:
    pools, found = run(prompts(*[1] * 5, tokens=tokens), failing=0)
    leases = pools.dispatcher.leases.counters()
    assert leases.granted == leases.pulled + leases.released == 5
    assert pools.dispatcher.members.last_failure == {}
    assert found["prefill blocks"] == 0
