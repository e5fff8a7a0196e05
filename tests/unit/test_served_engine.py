"""A served cluster as something to measure: its stream, its records, its mistakes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from cluster.engine.base import EngineDelta, EngineRequest
from cluster.engine.served import ServedEngine
from cluster.errors import EngineFailed, PdserveError, UserError

REPLICA = {
    "id": "decode-1", "incarnation": "i", "block_size_tokens": 16, "kv_total_blocks": 100, "kv_bytes_per_token": 64,
    "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 2048, "tp": 1, "pp": 1, "accelerator": None,
}  # fmt: skip


def status(prefill: int = 1, decode: int = 1) -> dict[str, Any]:
    pools = {"prefill": {"replicas": [REPLICA] * prefill}, "decode": {"replicas": [REPLICA] * decode}}
    return {"model": "m", "engine": "vllm", "pools": pools}


def sse(*events: dict[str, Any]) -> bytes:
    return b"".join(f"data: {json.dumps(e)}\n\n".encode() for e in events) + b"data: [DONE]\n\n"


def token(number: int) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "x", "token_ids": [number]}]}


async def ask(answers: Any, tokens: int) -> list[EngineDelta | PdserveError]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(answers), base_url="http://cluster") as http:
        engine, got, ended = ServedEngine(http, status()), [], asyncio.Event()

        def sink(request_id: str, item: EngineDelta | PdserveError) -> None:
            assert request_id == "fit-1"
            got.append(item)
            if isinstance(item, PdserveError) or item.finish_reason:
                ended.set()

        await engine.start(EngineRequest("fit-1", [5, 6, 7], tokens), sink)
        await asyncio.wait_for(ended.wait(), 5)
        return got


async def test_a_prompt_has_the_compute_time_of_its_record_which_may_come_later() -> None:
    asked: list[httpx.Request] = []

    def answers(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if request.url.path == "/v1/completions":
            return httpx.Response(200, content=sse(token(9)))
        mine = {"client_request_id": "fit-1", "stage_s": {"prefill_compute": 0.25}}
        return httpx.Response(200, json=[{"client_request_id": "other"}, *([mine] if len(asked) > 2 else [])])

    first, last = await ask(answers, 1)
    assert isinstance(first, EngineDelta) and isinstance(last, EngineDelta)
    assert (first.token_ids, first.finish_reason) == ([9], None)
    assert (last.token_ids, last.finish_reason, last.compute_s) == ([], "length", 0.25)
    body = json.loads(asked[0].content)
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([5, 6, 7], 1, True)
    assert asked[0].headers["x-request-id"] == "fit-1"


async def test_every_event_of_a_stream_is_a_step() -> None:
    got = await ask(lambda _: httpx.Response(200, content=sse(token(1), token(2), token(3))), 3)
    assert [d.token_ids for d in got if isinstance(d, EngineDelta)] == [[1], [2], [3], []]


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(503, json={"error": {"message": "no decode worker is ready"}}),
        httpx.Response(200, content=sse(token(1), {"error": {"message": "the worker died"}})),
        httpx.Response(200, content=b"data: {broken\n\n"),
    ],
)
async def test_whatever_goes_wrong_ends_the_measurement(answer: httpx.Response) -> None:
    got = await ask(lambda _: answer, 3)
    assert isinstance(got[-1], EngineFailed)


@pytest.mark.parametrize("prefill, decode", [(2, 1), (1, 0)])
def test_several_replicas_are_not_measured_as_one(prefill: int, decode: int) -> None:
    with pytest.raises(UserError, match="replicas; a profile is measured on one"):
        ServedEngine(httpx.AsyncClient(), status(prefill, decode))


@pytest.mark.parametrize(
    "records",
    [
        httpx.Response(500, json=[]),
        httpx.Response(401, json={"error": "no key"}),
        httpx.Response(200, json=None),
        httpx.Response(200, json=["record"]),
        httpx.Response(200, json=[{"client_request_id": "fit-1", "stage_s": None}]),
    ],
)
async def test_records_that_cannot_be_read_end_the_measurement(records: httpx.Response) -> None:
    def answers(request: httpx.Request) -> httpx.Response:
        return records if request.url.path == "/pdserve/records" else httpx.Response(200, content=sse(token(9)))

    got = await ask(answers, 1)
    assert isinstance(got[-1], EngineFailed) and "the endpoint failed" in str(got[-1])
