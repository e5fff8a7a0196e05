"""Errors of the two APIs whose layer has no event for ours, through the whole front of one process. No Ray."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from bad_bodies import CHAT, RESPONSES
from front import LIMITS, MODEL, Front, running
from in_process import until

from cluster.config import AdmissionConfig, PlacementConfig
from cluster.errors import BadRequest
from cluster.messages import Outcome, Role
from cluster.perf.times import LinearTimes
from router.admission import Admission
from router.placement import Placer
from router.prefix_index import PrefixIndex

# Importing vLLM and torch warns of their own affairs.
pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("default")]

MESSAGES = "/v1/messages"
STEP = {"linear": {"fixed_ms": 10, "per_prefill_token_us": 20, "transfer_fixed_ms": 2}}
TURN = [{"role": "user", "content": "tell me of caches"}]
BODIES = {
    CHAT: {"messages": TURN, "max_tokens": 200},
    RESPONSES: {"input": "tell me of caches", "max_output_tokens": 200, "ignore_eos": True},
    MESSAGES: {"messages": TURN, "max_tokens": 200},
}
BOTH = pytest.mark.parametrize("path", [RESPONSES, MESSAGES])


async def asked(http: httpx.AsyncClient, path: str, **fields: Any) -> tuple[httpx.Response, list[tuple[str, Any]]]:
    """The answer, and the named events of its stream."""
    response = await http.post(path, json={"model": MODEL, **BODIES[path], "stream": True, **fields})
    found, name = [], ""
    for line in response.text.splitlines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: {"):
            found.append((name, json.loads(line.removeprefix("data: "))))
    return response, found


def client(front: Front) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=front.url, timeout=30)


@BOTH
async def test_without_a_worker_a_stream_is_a_503(path: str) -> None:
    async with running(decode=0) as front, client(front) as http:
        response, _ = await asked(http, path)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["message"] == "no decode worker is ready"
        assert (response.json().get("type"), "code" in response.json()["error"]) == (
            ("error", False) if path == MESSAGES else (None, True)
        )


@BOTH
async def test_beyond_a_budget_a_stream_is_a_429(path: str) -> None:
    placer = Placer(PlacementConfig(), lambda _: LinearTimes(), PrefixIndex())
    admission = Admission(AdmissionConfig(tenant_tokens_per_s=1.0), placer, 1.0)
    async with running(placing=placer, admission=admission) as front, client(front) as http:
        first, _ = await asked(http, path)
        assert first.status_code == 200
        response, _ = await asked(http, path)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) > 1
        assert [(r.outcome, r.status) for r in front.cluster.records] == [(Outcome.DONE, None), (Outcome.REJECTED, 429)]


@BOTH
async def test_a_stream_that_fails_after_a_token_ends_with_one_error_event(path: str) -> None:
    async with running(simulated=STEP, limits=LIMITS.model_copy(update={"migrations": 0})) as front:
        cluster = front.cluster
        async with client(front) as http:
            task = asyncio.create_task(asked(http, path))
            await until(lambda: any(r.tokens(0) >= 5 for r in cluster.dispatcher.runs()), 5.0)
            (busy,) = [w for w in cluster.workers(Role.DECODE) if w.snapshot().running]
            (leg,) = busy._legs
            busy._sink(leg, BadRequest("the grammar cannot go on"))
            response, found = await task
        assert response.status_code == 200
        names = [name for name, _ in found]
        assert names[0] == {RESPONSES: "response.created", MESSAGES: "message_start"}[path]
        assert names.count("error") == 1
        assert names[-1] == "error"
        error = found[-1][1]
        assert error["type"] == "error"
        assert (error if path == RESPONSES else error["error"])["message"] == "the grammar cannot go on"


@BOTH
async def test_a_stream_that_goes_well_is_whole(path: str) -> None:
    async with running() as front, client(front) as http:
        response, found = await asked(http, path)
        assert response.status_code == 200
        assert found[-1][0] == {RESPONSES: "response.completed", MESSAGES: "message_stop"}[path]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("mm_features", "images, audio and video are not supported"),
        ("prompt_embeds", "prompt embeddings are not supported"),
    ],
)
async def test_what_legs_cannot_carry_is_a_400(
    path: str, stream: bool, field: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are sent token ids: an image would be left out, and its client told 200."""
    async with running() as front, client(front) as http:
        # The embedded model sees nothing; this is what the processor of one that does gives.
        processor = front.cluster.dispatcher._deliver.__self__.input_processor  # type: ignore[attr-defined]
        process = processor.process_inputs

        def with_more(*args: Any, **kwargs: Any) -> Any:
            core = process(*args, **kwargs)
            setattr(core, field, [SimpleNamespace()])
            return core

        monkeypatch.setattr(processor, "process_inputs", with_more)
        response, _ = await asked(http, path, stream=stream)
        assert response.status_code == 400
        assert what in response.json()["error"]["message"]
        assert front.cluster.records == []
