"""`pdserve fit`: an engine with known step times, in virtual time, gives its coefficients back."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from cluster.commands import fit
from cluster.commands.fit import _hold_out
from cluster.engine.base import EngineDelta, EngineRequest, Sink
from cluster.engine.measure import OUTPUT, Measured, Meter
from cluster.engine.served import ServedMeasured
from cluster.engine.simulation.virtual_time import run_virtual
from cluster.errors import EngineFailed
from cluster.messages import Role, WorkerInfo
from cluster.perf.fitting import fit_steps
from cluster.perf.profile import Coefficients, HostSlowdown, ProfileTimes

TRUE = Coefficients(3e-3, 5e-5, 0.0, 1e-4, 2e-7, 1e-3)
OVERHEAD_S = 2e-3


class VirtualEngine:
    """Whole prompts and all decodes in one iteration, as in continuous batching; the clock moves by the step's time."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.now = 0.0
        self.times = ProfileTimes(TRUE)
        self.info = WorkerInfo("w", "i", Role.DECODE, 16, 4096, 4096, 64, 2048, 2048)
        self._waiting: list[tuple[EngineRequest, Sink]] = []
        self._running: dict[str, tuple[Sink, int, int]] = {}
        self._task: asyncio.Task[None] | None = None
        self._fail_after = fail_after

    async def start(self, request: EngineRequest, sink: Sink) -> None:
        self._waiting.append((request, sink))
        if self._fail_after is not None:
            self._fail_after -= 1
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        await asyncio.sleep(0)
        while self._waiting or self._running:
            new, self._waiting = self._waiting, []
            prompts = [(len(r.prompt_token_ids), 0) for r, _ in new]
            context = sum(tokens for _, tokens, _ in self._running.values())
            step_s = self.times.step_s(prompts, len(self._running), context)
            self.now += step_s
            running, self._running = self._running, {}
            for request_id, (sink, tokens, left) in running.items():
                if left > 1:
                    self._running[request_id] = (sink, tokens + 1, left - 1)
                sink(request_id, EngineDelta([1], finish_reason="length" if left == 1 else None))
            if new:
                self.now += OVERHEAD_S if not running else 0.0
            for request, sink in new:
                if self._fail_after is not None and self._fail_after <= 0:
                    sink(request.request_id, EngineFailed("the engine died"))
                    continue
                left = request.sampling - 1
                if left:
                    self._running[request.request_id] = (sink, len(request.prompt_token_ids) + 1, left)
                delta = EngineDelta([1], finish_reason=None if left else "length", compute_s=step_s)
                sink(request.request_id, delta)
            await asyncio.sleep(0)


def _meter(engine: Any) -> Meter:
    return Meter(engine, lambda tokens: tokens, (5, 50), random.Random(1), clock=lambda: engine.now)


class VirtualPair:
    """A prompt engine and a decode engine of one host, on the event loop's own (virtual) time."""

    def __init__(self, prefill: float, decode: float) -> None:
        self.info = WorkerInfo("w", "i", Role.DECODE, 16, 4096, 4096, 64, 2048, 2048)
        self._slowdown = HostSlowdown(prefill, decode)
        self._prompts = self._decoding = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, request: EngineRequest, sink: Sink) -> None:
        task = asyncio.create_task(self._run(request, sink))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, request: EngineRequest, sink: Sink) -> None:
        self._prompts += 1
        compute_s = 1e-3 * len(request.prompt_token_ids) * (1 + self._slowdown.prefill * bool(self._decoding))
        await asyncio.sleep(compute_s)
        self._prompts -= 1
        left = request.sampling - 1
        sink(request.request_id, EngineDelta([1], finish_reason=None if left else "length", compute_s=compute_s))
        self._decoding += left > 0
        while left:
            left -= 1
            await asyncio.sleep(0.01 * (1 + self._slowdown.decode * bool(self._prompts)))
            sink(request.request_id, EngineDelta([1], finish_reason=None if left else "length"))
            self._decoding -= not left


def test_what_one_pool_costs_the_other_on_a_shared_host_is_measured() -> None:
    async def measure() -> HostSlowdown | None:
        meter = Meter(
            VirtualPair(0.2, 0.5), int, (5, 50), random.Random(1), clock=asyncio.get_running_loop().time, mixed=False
        )
        return await meter.host_slowdown()

    measured = run_virtual(measure())
    assert measured is not None
    assert (measured.prefill, measured.decode) == (pytest.approx(0.2), pytest.approx(0.5))


async def test_the_coefficients_of_a_known_engine_come_back() -> None:
    engine = VirtualEngine()
    measured = await _meter(engine).run(repeats=2, max_batch=32)
    kinds = {s.kind for s in measured.samples}
    assert kinds == {"prefill", "decode", "mixed"}
    fitted = fit_steps(measured.samples)
    assert fitted.residuals["all"].p90 < 0.02
    c = fitted.coefficients
    assert c.fixed_s == pytest.approx(TRUE.fixed_s, rel=0.05) and c.token_s == pytest.approx(TRUE.token_s, rel=0.05)
    assert c.context_token_s == pytest.approx(TRUE.context_token_s, rel=0.1)
    assert sorted(measured.overhead_s)[len(measured.overhead_s) // 2] == pytest.approx(OVERHEAD_S, rel=0.01)


async def test_measurements_stay_within_what_the_engine_holds() -> None:
    engine = VirtualEngine()
    engine.info = WorkerInfo("w", "i", Role.DECODE, 16, 40, 4096, 4, 256, 512)
    measured = await _meter(engine).run(repeats=1)
    assert max(n for s in measured.samples for n, _ in s.prefill) <= 256
    assert max(s.decode_batch for s in measured.samples) <= 4
    assert max(s.decode_context_tokens for s in measured.samples) <= 40 * 16


async def test_an_engine_that_dies_ends_the_measurement() -> None:
    with pytest.raises(EngineFailed, match="the engine died"):
        await _meter(VirtualEngine(fail_after=5)).run()


def test_a_fifth_is_held_out_unless_there_are_few() -> None:
    samples = list(range(20))
    kept, held = _hold_out(samples)  # type: ignore[arg-type]
    assert held == [4, 9, 14, 19] and sorted(kept + held) == samples
    assert _hold_out(samples[:10]) == (samples[:10], [])  # type: ignore[arg-type]


@pytest.mark.parametrize("max_model_len", [8, 16, 64, 100, 512])
async def test_requests_fit_the_longest_sequence_of_the_engine(max_model_len: int) -> None:
    engine = VirtualEngine()
    engine.info = WorkerInfo("w", "i", Role.DECODE, 16, 4096, 4096, 64, 2048, max_model_len)
    asked: list[tuple[int, int]] = []
    start = engine.start

    async def noted(request: EngineRequest, sink: Sink) -> None:
        asked.append((len(request.prompt_token_ids), request.sampling))
        await start(request, sink)

    engine.start = noted  # type: ignore[method-assign]
    await _meter(engine).run(repeats=1)
    assert min(prompt for prompt, _ in asked) >= 1
    assert max(prompt + output for prompt, output in asked) <= max_model_len


@pytest.mark.parametrize(("max_model_len", "measured"), [(335, False), (336, True), (400, True)])
def test_host_slowdown_is_measured_where_its_sequences_fit(max_model_len: int, measured: bool) -> None:
    pair = VirtualPair(0.2, 0.5)
    pair.info = WorkerInfo("w", "i", Role.DECODE, 16, 4096, 4096, 64, 2048, max_model_len)

    async def measure() -> HostSlowdown | None:
        clock = asyncio.get_running_loop().time
        return await Meter(pair, int, (5, 50), random.Random(1), clock=clock, mixed=False).host_slowdown()

    found = run_virtual(measure())
    assert (found is not None) == measured
    if found is not None:
        assert found.prefill == pytest.approx(0.2)


class AllAtOnce(VirtualEngine):
    """Every token of a request in one instant, as from a proxy that buffers; or none at all."""

    def __init__(self, tokens: bool = True) -> None:
        super().__init__()
        self._tokens = tokens

    async def start(self, request: EngineRequest, sink: Sink) -> None:
        self.now += 1e-2
        sink(request.request_id, EngineDelta([1] * request.sampling * self._tokens, finish_reason="length"))


async def test_steps_that_cannot_be_told_apart_give_no_sample() -> None:
    meter = _meter(AllAtOnce())
    measured = await meter.run(repeats=1)
    assert {s.kind for s in measured.samples} == {"prefill"}
    assert (await meter.host_slowdown(rounds=2)) == HostSlowdown(0.0, 0.0)


async def test_a_request_without_a_token_ends_the_measurement() -> None:
    with pytest.raises(EngineFailed, match="ended without a token"):
        await _meter(AllAtOnce(tokens=False)).run()


async def test_two_meters_never_use_one_id() -> None:
    ids: list[set[str]] = []
    for seed in (1, 2):
        engine, mine = VirtualEngine(), set()
        start = engine.start

        async def noted(request: EngineRequest, sink: Sink, start: Any = start, mine: set[str] = mine) -> None:
            mine.add(request.request_id)
            await start(request, sink)

        engine.start = noted  # type: ignore[method-assign]
        await Meter(engine, int, (5, 50), random.Random(seed), clock=lambda: 0.0).run(repeats=1, max_batch=1)
        ids.append(mine)
    assert ids[0] and not ids[0] & ids[1]


class Uneven(VirtualEngine):
    """Three decode steps of four take 1 ms less than the cost model says, the fourth 3 ms more: one mean."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0
        exact = self.times.step_s

        def step_s(prefill: Any, batch: int, context: int) -> float:
            self._steps += bool(batch)
            shift_s = (3e-3 if self._steps % 4 == 0 else -1e-3) if batch else 0.0
            return exact(prefill, batch, context) + shift_s

        self.times.step_s = step_s  # type: ignore[method-assign]


async def test_steps_are_fitted_to_their_mean_which_is_what_tpot_is_of() -> None:
    engine = Uneven()
    measured = await _meter(engine).run(repeats=1, max_batch=1, max_context=256)
    steps = [s for s in measured.samples if s.kind == "decode"]
    for sample in steps:
        true_s = ProfileTimes(TRUE).step_s((), 1, sample.decode_context_tokens)
        assert sample.duration_s == pytest.approx(true_s, abs=2e-6)
    assert len(steps) >= OUTPUT // 8


async def test_every_batch_that_decoded_alone_is_told_apart() -> None:
    measured = await _meter(VirtualEngine()).run(repeats=2, max_batch=4, max_context=256)
    spans = measured.decode_batches
    batches = [measured.samples[first:end] for first, end in spans]
    assert all(len({s.decode_batch for s in batch}) == 1 and len(batch) == OUTPUT // 8 - 1 for batch in batches)
    assert sorted({batch[0].decode_batch for batch in batches}) == [1, 2, 4]
    assert sum(map(len, batches)) == sum(s.kind == "decode" for s in measured.samples)


def test_an_engine_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> Any:
        raise EngineFailed("no output for 120 s while measuring")

    monkeypatch.setattr(fit, "_bench_engine", fails)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--out", str(tmp_path / "p.json")])
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "fit: the engine failed while measuring: no output for 120 s while measuring; look into its log" in said
    assert "Traceback" not in said and not (tmp_path / "p.json").exists()


def test_a_served_profile_says_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(*_: Any) -> Any:
        return ServedMeasured(replace(VirtualEngine().info, tp=2, pp=3), Measured([], [0.001]), None)

    monkeypatch.setattr("cluster.engine.served.measure_served", measured)
    said = {"model": "m", "engine": "vllm", "pools": {"decode": {}}}
    monkeypatch.setattr("cluster.runtime.local.fetch_status", lambda *_: said)
    _, provenance, _ = fit._bench_served("http://x", None, 1, 1, None)
    assert (provenance["tp"], provenance["pp"]) == (2, 3)
