"""The real engines' profile, measured on the same cluster as the loads: one round before each and one after the last.

A machine whose speed drifts would otherwise be one machine in the profile and another in the loads. A rate is compared
with the rounds that stand around its loads; the loads' own requests are no part of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import msgspec

from cluster.engine.measure import engine_limits
from cluster.engine.served import measure_served
from cluster.errors import EngineFailed, UserError
from cluster.perf.fitting import StepSample, fit_steps, variation_of
from cluster.perf.profile import HostSlowdown, Profile
from cluster.runtime.local import fetch_status
from cluster.runtime.urgent import urgent

REPEATS = 2
MAX_BATCH = 4
BESIDE_ROUNDS = 4


def measure(url: str) -> dict[str, Any]:
    """One round of `pdserve fit --url` as plain values; its cluster has nothing else to do meanwhile.

    Raises:
        UserError: the cluster does not answer, or failed a request.
    """
    status = fetch_status(url, None)
    round_ = measure_served(
        url, None, status, REPEATS, MAX_BATCH, lambda _line: None, rounds=1, beside_rounds=BESIDE_ROUNDS
    )
    try:
        with urgent():
            found = asyncio.run(round_)
    except EngineFailed as e:
        raise UserError(f"the cluster failed while its engines were measured: {e}; see its log") from e
    assert found.host_slowdown is not None, "the plan's cluster has two pools and long sequences"
    return {
        "limits": engine_limits(found.info, found.measured),
        "samples": [asdict(sample) for sample in found.measured.samples],
        "decode_batches": found.measured.decode_batches,
        "host_slowdown": asdict(found.host_slowdown),
    }


def around(loads: Sequence[tuple[Mapping[str, Any], int]]) -> Profile:
    """The profile for some loads, each with its session: from the rounds before and after them."""
    rounds = []
    for session, load in loads:
        number = next(i for i, run in enumerate(session["runs"]) if run["load"] == load)
        rounds += session["fits"][number - 1 : number + 1]
    return pooled(rounds)


def pooled(rounds: Sequence[Mapping[str, Any]]) -> Profile:
    """Step times fitted to all samples of the rounds, with what remains as variation; the means of their slowdowns."""
    samples: list[StepSample] = []
    batches: list[list[StepSample]] = []
    for kept in rounds:
        mine = msgspec.convert(kept["samples"], list[StepSample])
        samples += mine
        batches += [mine[first:end] for first, end in kept["decode_batches"]]
    fit = fit_steps(samples)
    slowdown = HostSlowdown(*(fmean(r["host_slowdown"][pool] for r in rounds) for pool in ("prefill", "decode")))
    variation = variation_of(fit.coefficients, batches)
    return Profile(fit.coefficients, rounds[0]["limits"], fit.residuals, slowdown, variation)
