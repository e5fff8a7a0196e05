"""Measures the iterations of any engine through its protocol: what `pdserve fit` turns into a profile.

Three kinds of samples: a prompt alone (the engine's own time from scheduling to the first token), a batch that only
decodes (the gap between its steps), and a prompt that arrives while a batch decodes (the one long gap).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Protocol

from cluster.engine.base import EngineDelta, EngineRequest, Sink
from cluster.errors import EngineFailed, PdserveError
from cluster.messages import WorkerInfo
from cluster.perf.fitting import StepSample
from cluster.perf.profile import HostSlowdown

PROMPTS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (32, 256, 512, 1024, 4096)
STEPS = 24
GROUP = 8
OUTPUT = STEPS + 2 * GROUP
"""Tokens of each sequence of a batch: what comes first and last, before all and after some decode, is left out."""
ROUNDS = 2
BESIDE_STEPS = 80
BESIDE_CONTEXT = 256
DEADLINE_S = 120.0
SAME_STEP_S = 3e-4
REST_S = 1.0
"""For measurements of real engines, in real time."""


@dataclass(slots=True)
class Measured:
    """
    Attributes:
        decode_batches: first and last + 1 of the samples of each batch that only decoded.
        overhead_s: between engine and caller, what no iteration explains (both ways together).
    """

    samples: list[StepSample] = field(default_factory=list)
    decode_batches: list[tuple[int, int]] = field(default_factory=list)
    overhead_s: list[float] = field(default_factory=list)


class _Stream:
    """Arrival times of one request's tokens."""

    def __init__(self, prompt_tokens: int, clock: Callable[[], float]) -> None:
        self.prompt_tokens = prompt_tokens
        self._clock = clock
        self.started = clock()
        self.at: list[float] = []
        self.compute_s: float | None = None
        self.error: PdserveError | None = None
        self.first, self.settled, self.done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def receive(self, _request_id: str, item: EngineDelta | PdserveError) -> None:
        if isinstance(item, PdserveError):
            self.error = item
            for event in (self.first, self.settled, self.done):
                event.set()
            return
        now = self._clock()
        self.at.extend([now] * len(item.token_ids))
        self.compute_s = item.compute_s if item.compute_s is not None else self.compute_s
        if self.at:
            self.first.set()
        if len(self.at) >= GROUP:
            self.settled.set()
        if item.finish_reason is not None:
            for event in (self.first, self.settled, self.done):
                event.set()


def engine_limits(info: WorkerInfo, measured: Measured) -> dict[str, Any]:
    """What a simulated engine needs to know beside step times; part of a profile's provenance."""
    return {
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "max_num_seqs": info.max_num_seqs,
        "block_size_tokens": info.block_size_tokens,
        "kv_total_blocks": info.kv_total_blocks,
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "request_overhead_s": round(median(measured.overhead_s or [0.0]), 6),
    }


class Measurable(Protocol):
    """What of the engine protocol a measurement needs."""

    @property
    def info(self) -> WorkerInfo: ...

    async def start(self, request: EngineRequest, sink: Sink) -> None: ...


class Meter:
    """Runs the measurements on one engine.

    Args:
        sampling: output tokens -> engine-specific parameters for exactly that many tokens.
        token_ids: range that prompts are drawn from; every prompt is new, so that no prefix is cached.
        mixed: one engine computes prompts and decodes, so that steps which do both are measured as well.
        rest_s: before every prompt that is measured alone. On CPU one that comes right after another finds its weights
            in the caches and takes 5 to 10% less than what requests see.
    """

    def __init__(
        self,
        engine: Measurable,
        sampling: Callable[[int], Any],
        token_ids: tuple[int, int],
        rng: random.Random,
        progress: Callable[[str], None] = lambda _line: None,
        clock: Callable[[], float] = time.perf_counter,
        mixed: bool = True,
        rest_s: float = 0.0,
    ) -> None:
        self._mixed, self._rest_s = mixed, rest_s
        self._engine, self._sampling, self._ids, self._rng = engine, sampling, token_ids, rng
        self._clock = clock
        self._progress = progress
        # Two runs against one router would otherwise find each other's records there.
        self._prefix, self._number = f"fit-{rng.getrandbits(48):012x}", 0

    async def run(
        self, repeats: int = 4, max_batch: int = 32, max_context: int | None = None, rounds: int = ROUNDS
    ) -> Measured:
        """All three kinds of samples, within what the engine can hold.

        Raises:
            EngineFailed: the engine died, or a step took longer than two minutes.
        """
        info = self._engine.info
        most = max_context or info.max_model_len
        longest = min(info.max_model_len - OUTPUT, most)
        budget = min(info.max_num_batched_tokens, info.max_model_len - 1, most)
        pool = info.kv_total_blocks * info.block_size_tokens
        measured = Measured()
        await self._prompt(min(64, budget), Measured())  # warm-up: first kernels and first contact
        # All of it several times over, not each part several times in a row: a machine that is slow for some seconds
        # then slows a share of every part.
        rounds = min(rounds, repeats)
        for number in range(rounds):
            of = f", round {number + 1} of {rounds}"
            for tokens in [p for p in PROMPTS if p <= budget]:
                self._progress(f"prompts of {tokens} tokens{of}")
                for _ in range(len(range(number, repeats, rounds))):
                    await self._prompt(tokens, measured)
            for batch in [b for b in BATCHES if b <= min(max_batch, info.max_num_seqs)]:
                for context in [c for c in CONTEXTS if c <= longest and batch * (c + OUTPUT) <= 0.9 * pool]:
                    self._progress(f"decode of {batch} sequences with {context} tokens of context{of}")
                    await self._batch(batch, context, None, measured)
                    for prompt in (64, 512) if self._mixed else ():
                        if batch in (4, 16) and context == 256 and prompt + batch <= budget:
                            await self._batch(batch, context, prompt, measured)
        return measured

    async def host_slowdown(self, rounds: int = 8) -> HostSlowdown | None:
        """How much longer prompts take while the decode pool works, and decode steps while the prefill pool does.

        Only where the two are different engines. Each round has its own undisturbed measurements, so that a machine
        that drifts does not matter. None: the engines' sequences are too short to tell.
        """
        info = self._engine.info
        if info.max_model_len < BESIDE_CONTEXT + BESIDE_STEPS:
            return None
        prompt_tokens = min(512, info.max_num_batched_tokens, info.max_model_len - 1)
        prompts, steps = [], []
        for number in range(rounds):
            self._progress(f"one pool beside the other, {number + 1} of {rounds}")
            alone = Measured()
            await self._prompt(prompt_tokens, alone)
            streams = [await self._start(BESIDE_CONTEXT, BESIDE_STEPS) for _ in range(2)]
            await self._wait([s.settled for s in streams], streams)
            late = await self._start(prompt_tokens, 1)
            await self._wait([s.done for s in (*streams, late)], [*streams, late])
            compute_s = late.compute_s or late.at[0] - late.started
            prompts.append(compute_s / alone.samples[0].duration_s)
            from_s, to_s = late.at[0] - compute_s, late.at[0]
            gaps = list(itertools.pairwise(_merge(streams[0].at)))
            # The first of them may have begun as the prompt's work did.
            beside = [b - a for a, b in gaps if a >= from_s and b <= to_s][1:]
            # Until both sequences decode, the prompt of one is computed beside the other.
            both_s = max(s.at[0] for s in streams)
            undisturbed = [b - a for a, b in gaps if a > both_s and (b <= from_s or a >= to_s)]
            if len(beside) >= 4 and undisturbed:
                steps.append(fmean(beside) / fmean(undisturbed))
        return HostSlowdown(max(0.0, median(prompts) - 1), max(0.0, median(steps) - 1) if steps else 0.0)

    async def _start(self, prompt_tokens: int, output_tokens: int) -> _Stream:
        self._number += 1
        low, high = self._ids
        ids = [self._rng.randint(low, high) for _ in range(prompt_tokens)]
        stream = _Stream(prompt_tokens, self._clock)
        request = EngineRequest(f"{self._prefix}-{self._number}", ids, self._sampling(output_tokens))
        await self._engine.start(request, stream.receive)
        return stream

    async def _wait(self, events: Sequence[asyncio.Event], streams: Sequence[_Stream]) -> None:
        try:
            await asyncio.wait_for(asyncio.gather(*(e.wait() for e in events)), DEADLINE_S)
        except TimeoutError:
            raise EngineFailed(f"no output for {DEADLINE_S:.0f} s while measuring") from None
        for stream in streams:
            if stream.error is not None:
                raise stream.error
            if not stream.at:
                raise EngineFailed("a request ended without a token while measuring")

    async def _prompt(self, tokens: int, measured: Measured) -> None:
        if self._rest_s:
            await asyncio.sleep(self._rest_s)
        stream = await self._start(tokens, 1)
        await self._wait([stream.done], [stream])
        wall_s = stream.at[0] - stream.started
        duration_s = stream.compute_s if stream.compute_s else wall_s
        measured.overhead_s.append(max(0.0, wall_s - duration_s))
        measured.samples.append(StepSample(((tokens, 0),), 0, 0, duration_s))

    async def _batch(self, batch: int, context: int, prompt: int | None, measured: Measured) -> None:
        streams = [await self._start(context, OUTPUT) for _ in range(batch)]
        await self._wait([s.first for s in streams], streams)
        late = None
        if prompt is not None:
            await self._wait([s.settled for s in streams], streams)
            late = await self._start(prompt, 1)
        everybody = [*streams, late] if late else streams
        await self._wait([s.done for s in everybody], everybody)
        # Only steps in which all sequences decoded: from the last first token to the first last token, as the sequence
        # that came last saw them.
        last = max(streams, key=lambda s: s.at[0])
        end = min(s.at[-1] for s in streams)
        steps = _merge([t for t in last.at if t <= end])
        if len(steps) < 2:
            return
        if late is None:
            first = len(measured.samples)
            gaps = [(b - a, sum(_context(s, a) for s in streams)) for a, b in itertools.pairwise(steps)]
            for i in range(0, len(gaps) - GROUP + 1, GROUP):
                group = gaps[i : i + GROUP]
                # The mean: that is what TPOT is of. Steps vary to one side, by a tenth or more on a small machine.
                middle = round(fmean(c for _, c in group))
                measured.samples.append(StepSample((), batch, middle, fmean(g for g, _ in group)))
            if len(measured.samples) > first:
                measured.decode_batches.append((first, len(measured.samples)))
            return
        plain_s = median(b - a for a, b in itertools.pairwise(steps))
        for a, b in itertools.pairwise(steps):
            # The step that computed the prompt ends with its token; a gap no longer than a plain one missed it.
            if b >= late.at[0] - SAME_STEP_S:
                if b - a > 1.2 * plain_s:
                    kv_tokens = sum(_context(s, a) for s in streams)
                    measured.samples.append(StepSample(((late.prompt_tokens, 0),), batch, kv_tokens, b - a))
                return


def _context(stream: _Stream, at: float) -> int:
    return stream.prompt_tokens + sum(1 for t in stream.at if t <= at)


def _merge(steps: list[float]) -> list[float]:
    """Several tokens of one step (speculation) come within a fraction of a millisecond: one instant."""
    merged: list[float] = []
    for t in steps:
        if merged and t - merged[-1] < SAME_STEP_S:
            continue
        merged.append(t)
    return merged
