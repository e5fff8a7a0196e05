"""What cannot be sent to the engine's process is the request's own fault, with vLLM's own encoder; no engine runs.

Kind: one out-of-range number kills the engine, or makes a healthy worker look broken.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.engine.base import EngineRequest
from cluster.engine.vllm.engine import VllmEngine
from cluster.errors import BadRequest
from cluster.messages import Role, WorkerInfo

pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("default")]


class Core:
    """Encodes a request as the client of the engine's process does, and has no process."""

    async def add_request_async(self, request: Any) -> None:
        from vllm.v1.serial_utils import MsgpackEncoder

        MsgpackEncoder().encode(request)

    async def get_output_async(self) -> Any:
        await asyncio.Event().wait()


async def test_a_number_that_cannot_be_sent_is_a_bad_request_and_leaves_nothing() -> None:
    engine = VllmEngine(Core(), WorkerInfo("w", "i", Role.DECODE, 16, 100, 64, 8, 512, 2048))
    heard: list[Any] = []
    try:
        with pytest.raises(BadRequest):
            await engine.start(EngineRequest("r", [1, 2, 3], None, priority=10**30), lambda *item: heard.append(item))
        assert engine.snapshot().queued_prefill_tokens == 0
        # The id is free again, and a good request passes.
        await engine.start(EngineRequest("r", [1, 2, 3], None), lambda *item: heard.append(item))
        assert engine.snapshot().queued_prefill_tokens == 3
    finally:
        engine._reader.cancel()
    assert heard == []
