"""One engine without a router: what the scheduler alone does with a stream of requests."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from cluster.engine.scheduler.config import SchedulerConfig
from cluster.engine.scheduler.sequence import Sequence
from cluster.engine.scheduler.step import Output
from cluster.messages import Outcome, Path, RequestRecord, Slo, Stage
from cluster.perf.times import StepTimes
from cluster.sim.engine import MAX_REPEATS, SimEngine
from cluster.sim.kernel import Kernel
from cluster.sim.record import token_times
from cluster.workload.arrival import Arrival
from cluster.workload.blocks import block_keys


@dataclass(slots=True)
class EngineRun:
    """Records in order of their ends, and the engine with its counters."""

    records: list[RequestRecord]
    engine: SimEngine
    end_s: float
    events: int


def run_engine(
    arrivals: Iterable[Arrival],
    config: SchedulerConfig,
    times: StepTimes,
    slo: Slo,
    *,
    seed: int = 0,
    max_repeats: int = MAX_REPEATS,
) -> EngineRun:
    """Serve all arrivals to their end. Requests that can never run are recorded as rejected."""
    kernel = Kernel()
    records: list[RequestRecord] = []

    def on_output(outputs: list[Output]) -> None:
        records.extend(_record(engine, o.sequence, slo) for o in outputs if o.finished)

    def arrive(number: int, arrival: Arrival) -> None:
        refusal = engine.scheduler.refusal(arrival.prompt_tokens, arrival.output_tokens)
        if refusal:
            refused = RequestRecord(str(number), Outcome.REJECTED, slo, arrival.at_s, arrival.at_s, error=refusal)
            refused.status = 400
            records.append(refused)
            return
        keys = block_keys(arrival.prompt, config.block_size_tokens) if config.prefix_caching else ()
        engine.submit(
            Sequence(str(number), arrival.prompt_tokens, arrival.output_tokens, keys, priority=arrival.priority)
        )

    engine = SimEngine(
        kernel, config, times, random.Random(seed), on_output, max_repeats=max_repeats, record_events=False
    )
    for number, arrival in enumerate(arrivals):
        kernel.at(arrival.at_s, arrive, number, arrival)
    kernel.run()
    return EngineRun(records, engine, kernel.now, kernel.events)


def _record(engine: SimEngine, sequence: Sequence, slo: Slo) -> RequestRecord:
    first_s, last_s, itl_s = token_times(engine, sequence)
    assert sequence.scheduled_s is not None
    return RequestRecord(
        request_id=sequence.seq_id,
        outcome=Outcome.DONE,
        slo=slo,
        arrival_s=sequence.arrival_s,
        end_s=last_s,
        priority=sequence.priority,
        path=Path.COLOCATED,
        decode_worker="engine",
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        decode_computed_tokens=sequence.prompt_tokens - sequence.cached_tokens,
        output_tokens=sequence.generated,
        ttft_s=first_s - sequence.arrival_s,
        tpot_s=(last_s - first_s) / (sequence.generated - 1) if sequence.generated > 1 else 0.0,
        itl_s=itl_s,
        stage_s={
            Stage.DECODE_QUEUE: sequence.scheduled_s - sequence.arrival_s,
            Stage.DECODE_STEP: first_s - sequence.scheduled_s,
        },
    )
