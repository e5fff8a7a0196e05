"""Simulated engines over real sockets: tickets between engines, KV events to the router's index."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config import parse
from cluster.engine.base import EngineDelta, EngineRequest
from cluster.engine.simulated import SimulatedEngine, create
from cluster.errors import PdserveError
from cluster.messages import Role
from kv_transfer.settings import TICKET_REQUEST
from router.block_keys import block_keys, namespace
from router.kv_event_reader import KvEventReader
from router.prefix_index import PrefixIndex

pytestmark = pytest.mark.live
PROMPT = [11 * i % 1900 for i in range(200)]


async def _run(engine: SimulatedEngine, request: EngineRequest) -> list[Any]:
    outputs: list[Any] = []
    ended = asyncio.Event()

    def sink(_: str, item: EngineDelta | PdserveError) -> None:
        outputs.append(item)
        if isinstance(item, PdserveError) or item.finish_reason is not None:
            ended.set()

    await engine.start(request, sink)
    await asyncio.wait_for(ended.wait(), 30)
    return outputs


async def test_ticket_and_events() -> None:
    config = parse(
        {
            "engine": {"kind": "simulated", "simulated": {"kv_blocks": 64, "max_model_len": 1024}},
            "kv_transfer": {"on_failure": "fail"},
        }
    )
    p, d = [
        await create(config, role, worker_id=str(role), incarnation="1", host="127.0.0.1", node="n")
        for role in (Role.PREFILL, Role.DECODE)
    ]
    index = PrefixIndex()
    reader = KvEventReader(index, 16, lambda *_: None)
    try:
        for engine in (p, d):
            reader.add(engine.info)
        (delta,) = await _run(p, EngineRequest("p", PROMPT, None, TICKET_REQUEST, cache_salt="s"))
        sampling = SimpleNamespace(max_tokens=20)
        outputs = await _run(d, EngineRequest("d", PROMPT, sampling, delta.kv_transfer_params, cache_salt="s"))
        assert sum(len(o.token_ids) for o in outputs) == 20
        assert outputs[0].external_tokens == 200
        assert p.scheduler.kv.used_blocks == 0

        gone = await _run(d, EngineRequest("d2", PROMPT[::-1], sampling, delta.kv_transfer_params))
        assert type(gone[0]).__name__ == "LeaseExpired"

        keys = block_keys(PROMPT, 16, namespace("s"))
        for _ in range(200):
            if len(index.longest_match(keys)) == 2:
                break
            await asyncio.sleep(0.05)
        assert index.longest_match(keys) == {"prefill": 12, "decode": 12}
        assert index.longest_match(block_keys(PROMPT, 16)) == {}
    finally:
        await reader.close()
        await p.shutdown()
        await d.shutdown()
