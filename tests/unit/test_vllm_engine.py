"""What a vLLM engine reports of its load, over a core that says what it is told to. vLLM itself is not loaded."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cluster.engine.base import EngineDelta, EngineRequest
from cluster.engine.vllm.engine import VllmEngine
from cluster.messages import Role, WorkerInfo

PULL = {"do_remote_prefill": True, "tp_size": 1}


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def to_delta(output: Any, timing: Any, at_s: float) -> EngineDelta:
        return EngineDelta([1], output.finish_reason)

    parts: dict[str, dict[str, Any]] = {
        "vllm.v1.engine": {"EngineCoreRequest": SimpleNamespace},
        "cluster.engine.vllm.outputs": {"Timing": object, "to_delta": to_delta},
        "cluster.engine.vllm.sampling": {"leg_sampling": lambda _: None},
    }
    for name, what in parts.items():
        module = ModuleType(name)
        module.__dict__.update(what)
        monkeypatch.setitem(sys.modules, name, module)
    yield


class Core:
    def __init__(self) -> None:
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()

    async def get_output_async(self) -> Any:
        return await self.outputs.get()

    async def add_request_async(self, request: Any) -> None: ...

    def shutdown(self, timeout_s: float) -> None: ...

    async def step(self, *finished: str, rank: int = 0, stats: tuple[int, int, float] | None = None) -> None:
        """One rank's step: its statistics are (running, waiting, share of its KV)."""
        told = None
        if stats is not None:
            told = SimpleNamespace(
                num_running_reqs=stats[0],
                num_waiting_reqs=stats[1],
                num_skipped_waiting_reqs=0,
                kv_cache_usage=stats[2],
                kv_connector_stats=None,
            )
        outputs = [SimpleNamespace(request_id=r, finish_reason="length") for r in finished]
        self.outputs.put_nowait(
            SimpleNamespace(engine_index=rank, outputs=outputs, scheduler_stats=told, timestamp=0.0)
        )
        for _ in range(3):
            await asyncio.sleep(0)


@asynccontextmanager
async def engine(**changes: Any) -> Any:
    core = Core()
    it = VllmEngine(core, WorkerInfo("w", "i", Role.DECODE, 16, 1000, 1, 64, 2048, 4096, **changes))
    try:
        yield it, core
    finally:
        with suppress(asyncio.CancelledError):
            await it.shutdown()


async def start(it: VllmEngine, request_id: str, tokens: int, **more: Any) -> None:
    await it.start(EngineRequest(request_id, [7] * tokens, None, **more), lambda *_: None)


async def test_queued_work_is_what_is_left_to_compute() -> None:
    """A decode engine that only pulls, and a prefill engine that holds a prefix, looked as busy as if they did not."""
    async with engine() as (it, core):
        await start(it, "cold", 1000)
        await start(it, "warm", 1000, predicted_cached_tokens=960)
        await start(it, "pulled", 1000, kv_transfer_params=PULL)
        await start(it, "held", 16, predicted_cached_tokens=16)
        assert it.snapshot().queued_prefill_tokens == 1000 + 40 + 1 + 1
        await core.step("cold")
        assert it.snapshot().queued_prefill_tokens == 42
        await core.step("warm", "pulled", "held")
        assert it.snapshot().queued_prefill_tokens == 0


async def test_the_load_of_an_engine_is_that_of_all_its_ranks() -> None:
    async with engine(accelerators=4, tp=2) as (it, core):
        await start(it, "r", 10)
        await core.step(rank=0, stats=(3, 2, 0.5))
        await core.step(rank=1, stats=(5, 0, 0.1))
        s = it.snapshot()
        assert (s.running, s.waiting, s.kv_used_blocks) == (8, 2, 300)
        await core.step(rank=1, stats=(1, 0, 0.1))
        s = it.snapshot()
        assert (s.running, s.waiting) == (4, 2)
        await core.step("r")
        assert (it.snapshot().running, it.snapshot().waiting) == (0, 0), "what was last told of aborted requests"


async def test_steps_are_those_of_one_rank_and_go_on_whichever_works() -> None:
    async with engine(accelerators=2) as (it, core):
        for _ in range(10):
            await core.step(rank=0)
            await core.step(rank=1)
        assert it.snapshot().steps == 10
        for rank in (1, 0):
            before = it.snapshot().steps
            for _ in range(10):
                await core.step(rank=rank)
            assert before + 9 <= it.snapshot().steps <= before + 10


async def test_an_engine_of_one_rank_counts_every_step() -> None:
    async with engine() as (it, core):
        for number in range(1, 6):
            await core.step()
            assert it.snapshot().steps == number
