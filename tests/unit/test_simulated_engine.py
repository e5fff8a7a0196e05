"""The simulated engine behind the engine protocol, in virtual time: hand-over, leases, faults, events."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import parse
from cluster.engine.base import EngineDelta, EngineRequest
from cluster.engine.simulated import SimulatedEngine, create
from cluster.engine.simulation.kv_publisher import Blocks
from cluster.engine.simulation.leases import LeaseBook, LocalPeers
from cluster.engine.simulation.virtual_time import run_virtual
from cluster.errors import BadRequest, ConfigError, EngineFailed, LeaseExpired, PdserveError, TransferFailed
from cluster.messages import Role, WorkerState
from kv_transfer.settings import TICKET_REQUEST

PROMPT = [7 * i % 1900 for i in range(100)]


def config(**simulated: Any) -> Any:
    on_failure, pools = simulated.pop("on_failure", "recompute"), simulated.pop("pools", {})
    return parse(
        {
            "engine": {"kind": "simulated", "simulated": {"kv_blocks": 64, "max_model_len": 512, **simulated}},
            "kv_transfer": {"lease_s": 5, "on_failure": on_failure},
            "router": {"limits": {"first_token_s": 0.001}},
            "pools": pools,
        }
    )


class Cluster:
    """One prefill and one decode engine of one process."""

    def __init__(self, **simulated: Any) -> None:
        self._config = config(**simulated)
        self.network: dict[int, LeaseBook] = {}
        self.outputs: dict[str, list[EngineDelta | PdserveError]] = {}
        self.ends: dict[str, asyncio.Event] = {}

    async def engine(self, role: Role) -> SimulatedEngine:
        return await create(
            self._config,
            role,
            worker_id=str(role),
            incarnation="1",
            host="h",
            node="n",
            peers=LocalPeers(self.network),
            publish=False,
        )

    def sink(self, request_id: str, item: EngineDelta | PdserveError) -> None:
        self.outputs.setdefault(request_id, []).append(item)
        if isinstance(item, PdserveError) or item.finish_reason is not None:
            self.ends.setdefault(request_id, asyncio.Event()).set()

    async def run(self, engine: SimulatedEngine, request: EngineRequest) -> list[Any]:
        await engine.start(request, self.sink)
        await self.ends.setdefault(request.request_id, asyncio.Event()).wait()
        return self.outputs[request.request_id]

    async def prefill(self, engine: SimulatedEngine, request_id: str = "p") -> dict[str, Any]:
        (delta,) = await self.run(engine, EngineRequest(request_id, PROMPT, None, TICKET_REQUEST))
        assert delta.finish_reason == "length"
        return dict(delta.kv_transfer_params)


def serve(request_id: str, tokens: int = 20, ticket: Any = None, prompt: list[int] | None = None) -> EngineRequest:
    return EngineRequest(request_id, prompt or PROMPT, SimpleNamespace(max_tokens=tokens), ticket)


def tokens_of(outputs: list[Any]) -> list[int]:
    return [token for delta in outputs for token in delta.token_ids]


def test_a_handed_over_request_gives_the_tokens_of_one_engine() -> None:
    async def main() -> None:
        c = Cluster()
        p, d, alone = await c.engine(Role.PREFILL), await c.engine(Role.DECODE), await c.engine(Role.DECODE)
        ticket = await c.prefill(p)
        assert p.scheduler.kv.used_blocks == 7
        split = await c.run(d, serve("d", ticket=ticket))
        whole = await c.run(alone, serve("a"))
        assert tokens_of(split) == tokens_of(whole)
        assert len(tokens_of(split)) == 20
        first = split[0]
        assert (first.external_tokens, first.cached_tokens) == (100, 99)
        assert first.transfer_bytes == 7 * 16 * d.info.kv_bytes_per_token
        assert first.transfer_s == pytest.approx(d._spec.times.transfer_s(first.transfer_bytes))
        assert d.scheduler.counters.computed_prompt_tokens == 1
        assert p.scheduler.kv.used_blocks == d.scheduler.kv.used_blocks == 0

    run_virtual(main())


@pytest.mark.parametrize("slow", [Role.PREFILL, Role.DECODE])
def test_kv_travels_as_fast_as_the_slower_side(slow: Role) -> None:
    async def main() -> None:
        c = Cluster(pools={slow.value: {"simulated": {"linear": {"transfer_gb_per_s": 0.1, "transfer_fixed_ms": 3}}}})
        engines = {role: await c.engine(role) for role in Role}
        ticket = await c.prefill(engines[Role.PREFILL])
        first = (await c.run(engines[Role.DECODE], serve("d", ticket=ticket)))[0]
        assert first.transfer_s == pytest.approx(engines[slow]._spec.times.transfer_s(first.transfer_bytes))
        assert first.transfer_s == pytest.approx(3e-3 + first.transfer_bytes / 1e8)

    run_virtual(main())


def test_a_continued_request_goes_on_with_the_same_tokens() -> None:
    async def main() -> None:
        c = Cluster()
        d = await c.engine(Role.DECODE)
        whole = tokens_of(await c.run(d, serve("a")))
        rest = tokens_of(await c.run(d, serve("b", 12, prompt=PROMPT + whole[:8])))
        assert whole[:8] + rest == whole

    run_virtual(main())


def test_steps_last_what_the_cost_model_says() -> None:
    async def main() -> None:
        c = Cluster()
        d = await c.engine(Role.DECODE)
        loop = asyncio.get_running_loop()
        await c.run(d, serve("a", 3))
        times = d._spec.times
        expected = times.step_s(((100, 0),), 0, 0) + sum(times.decode_run_s(1, 100, 2))
        assert loop.time() == pytest.approx(expected, rel=1e-9)
        assert d.busy_s == pytest.approx(expected)

    run_virtual(main())


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
def test_kv_that_was_given_up_is_never_used(on_failure: str) -> None:
    async def main() -> None:
        c = Cluster(on_failure=on_failure)
        p, d = await c.engine(Role.PREFILL), await c.engine(Role.DECODE)
        ticket = await c.prefill(p)
        await p.release(["p"])
        assert p.scheduler.kv.used_blocks == 0
        outputs = await c.run(d, serve("d", ticket=ticket))
        if on_failure == "fail":
            assert isinstance(outputs[0], LeaseExpired)
        else:
            assert len(tokens_of(outputs)) == 20
            assert outputs[0].external_tokens == 0
            assert d.scheduler.counters.computed_prompt_tokens == 100
        assert d.scheduler.kv.used_blocks == 0

    run_virtual(main())


def test_a_lease_ends_by_itself_and_a_reader_finds_out_at_the_end() -> None:
    async def main() -> None:
        c = Cluster(on_failure="fail", linear={"transfer_fixed_ms": 4000})
        p, d = await c.engine(Role.PREFILL), await c.engine(Role.DECODE)
        ticket = await c.prefill(p)
        await asyncio.sleep(2)
        # The pull starts at 2 s and would end at 6 s; the lease ends at 5 s.
        outputs = await c.run(d, serve("d", ticket=ticket))
        assert isinstance(outputs[0], LeaseExpired)
        assert p.scheduler.kv.used_blocks == d.scheduler.kv.used_blocks == 0

    run_virtual(main())


def test_an_abort_while_kv_travels_frees_both_sides_once() -> None:
    async def main() -> None:
        c = Cluster(linear={"transfer_fixed_ms": 1000})
        p, d = await c.engine(Role.PREFILL), await c.engine(Role.DECODE)
        ticket = await c.prefill(p)
        await d.start(serve("d", ticket=ticket), c.sink)
        await asyncio.sleep(0.1)
        assert d.scheduler.kv.used_blocks == 7
        await d.abort("d")
        assert d.scheduler.kv.used_blocks == 7, "blocks that a transfer writes to were given away"
        await asyncio.sleep(2)
        assert p.scheduler.kv.used_blocks == d.scheduler.kv.used_blocks == 0
        assert "d" not in c.outputs

    run_virtual(main())


def test_a_pull_of_nothing_completes_and_releases() -> None:
    async def main() -> None:
        c = Cluster()
        p, d = await c.engine(Role.PREFILL), await c.engine(Role.DECODE)
        prompt = PROMPT[:65]
        for turn in range(3):
            request = EngineRequest(f"p{turn}", prompt, None, TICKET_REQUEST)
            (delta,) = await c.run(p, request)
            outputs = await c.run(d, serve(f"d{turn}", ticket=delta.kv_transfer_params, prompt=prompt))
            assert outputs[0].external_tokens == (65 if turn == 0 else 0)
            assert p.scheduler.kv.used_blocks == d.scheduler.kv.used_blocks == 0
            assert len(p.leases) == 0

    run_virtual(main())


def test_faults() -> None:
    async def main() -> None:
        c = Cluster(on_failure="fail")
        p, d = await c.engine(Role.PREFILL), await c.engine(Role.DECODE)
        d.faults.failing_transfers = 1
        assert isinstance((await c.run(d, serve("1", ticket=await c.prefill(p))))[0], TransferFailed)

        loop = asyncio.get_running_loop()
        started = loop.time()
        await c.run(d, serve("2"))
        usual = loop.time() - started
        d.faults.slowdown = 3.0
        started = loop.time()
        await c.run(d, serve("3", prompt=PROMPT[::-1]))
        assert loop.time() - started == pytest.approx(3 * usual, rel=0.01)

        d.stall()
        steps = d.snapshot().steps
        await d.start(serve("4"), c.sink)
        await asyncio.sleep(10)
        assert (d.snapshot().steps, d.snapshot().waiting, "4" in c.outputs) == (steps, 1, False)
        d.resume()
        await c.ends.setdefault("4", asyncio.Event()).wait()

        seen: list[WorkerState] = []
        d.on_step(lambda snapshot: seen.append(snapshot.state))
        await d.start(serve("5", 100), c.sink)
        await asyncio.sleep(0.05)
        d.die()
        assert isinstance(c.outputs["5"][-1], EngineFailed)
        assert seen[-1] is WorkerState.DEAD
        with pytest.raises(EngineFailed):
            await d.check_health()
        with pytest.raises(EngineFailed):
            await d.start(serve("6"), c.sink)

    run_virtual(main())


def test_stop_tokens_end_a_request() -> None:
    async def main() -> None:
        c = Cluster()
        d = await c.engine(Role.DECODE)
        whole = tokens_of(await c.run(d, serve("a")))
        sampling = SimpleNamespace(max_tokens=20, stop_token_ids=[whole[6]])
        outputs = await c.run(d, EngineRequest("b", PROMPT, sampling))
        assert tokens_of(outputs) == whole[: whole.index(whole[6]) + 1]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", whole[6])
        assert d.scheduler.kv.used_blocks == 0

    run_virtual(main())


def test_mistakes() -> None:
    async def main() -> None:
        c = Cluster()
        d = await c.engine(Role.DECODE)
        with pytest.raises(BadRequest, match="max_model_len 512"):
            await d.start(serve("a", 413), c.sink)
        await d.start(serve("a", 412), c.sink)
        with pytest.raises(BadRequest, match="in use"):
            await d.start(serve("a"), c.sink)
        await d.shutdown()
        await d.shutdown()

    run_virtual(main())
    with pytest.raises(ConfigError, match=r"engine\.simulated\.hardwear: unknown key"):
        run_virtual(Cluster(hardwear="H100").engine(Role.DECODE))


def test_events_on_the_wire() -> None:
    from cluster.engine.scheduler.kv import Cleared, Removed, Stored

    blocks = Blocks(4)
    tokens = list(range(12))
    blocks.add("a", tokens, "salt")
    stored = blocks.encode(Stored([1, 2], None, "a", 0))
    assert stored is not None
    assert (stored["block_hashes"], stored["token_ids"], stored["extra_keys"]) == ([1, 2], tokens[:8], [["salt"], None])
    later = blocks.encode(Stored([3], 2, "a", 2))
    assert later is not None
    assert (later["parent_block_hash"], later["token_ids"]) == (2, tokens[8:])
    assert blocks.encode(Removed([1])) == {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    assert blocks.encode(Cleared()) == {"type": "AllBlocksCleared"}
    blocks.drop("a")
    assert blocks.encode(Stored([1], None, "a", 0)) is None
