"""The whole front in one process: gateway, vLLM's OpenAI layer, dispatcher, links, simulated engines. No Ray."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from bad_bodies import COMPLETION, VOCAB
from in_process import HIGH, LOW, Cluster, until

from cluster.config import LimitsConfig, parse
from cluster.engine.simulation.tokens import TokenStream
from cluster.messages import Slo

MODEL = "front"
CONFIG = {"model": {"id": "embedded", "served_name": MODEL}, "engine": {"kind": "simulated"}}
KEYS = {"KEYS": "key-of-tenant-a a,key-of-tenant-b b"}
LIMITS = LimitsConfig(silent_s=2, stall_s=3, queue_s=5, idle_s=5, first_token_s=5, prefill_s=5)


class Front:
    def __init__(self, cluster: Cluster, url: str) -> None:
        self.cluster, self.url = cluster, url


async def build(
    port: int, tenants: dict[str, str], http_options: dict[str, Any], prefill: int, decode: int, options: dict[str, Any]
) -> tuple[Cluster, uvicorn.Server]:
    from cluster.engine.vllm.arguments import shared_arguments
    from cluster.engine.vllm.environment import base_environment
    from cluster.models.resolve import resolve

    config = parse(CONFIG | {"router": {"tenants": tenants, "http": http_options}})
    model = resolve(config.model)
    os.environ.update(base_environment(config, True))
    from cluster.engine.vllm.serving import build_openai_app, describe_model
    from router.engine_client import ClusterEngineClient
    from router.gateway.stack import guard

    client = ClusterEngineClient(describe_model(shared_arguments(config, model.path)), "router", Slo(1, 1), lambda: 16)
    cluster = Cluster(seed=1, **{"deliver": client.deliver_jobs, "limits": LIMITS, **options})
    client.dispatcher = cluster.dispatcher
    await cluster.start(prefill=prefill, decode=decode)
    arguments = ["--model", model.path, "--served-model-name", MODEL, "--no-enable-log-requests"]
    arguments.append("--enable-prompt-tokens-details")
    app = await build_openai_app(client, arguments)
    vocabulary = client.model_config.get_vocab_size()
    assert vocabulary == VOCAB
    guarded = guard(app, config.router, vocab_size=vocabulary, slo=Slo(1, 1), environ=KEYS)
    server = uvicorn.Server(uvicorn.Config(guarded, port=port, log_level="warning", lifespan="off"))
    return cluster, server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def running(
    tenants: dict[str, str] | None = None,
    *,
    prefill: int = 2,
    decode: int = 2,
    http: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Front]:
    """A front that listens. `options` are those of `in_process.Cluster`."""
    port = free_port()
    cluster, server = await build(port, tenants or {}, http or {}, prefill, decode, options)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started, 10.0)
    try:
        yield Front(cluster, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        await task
        await cluster.stop()


def strict(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def completion(**fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL, "prompt": list(range(LOW, LOW + 50)), "max_tokens": 8, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    } | fields  # fmt: skip


def right(count: int, prompt: list[int] | None = None) -> list[int]:
    return TokenStream(prompt or list(range(LOW, LOW + 50)), LOW, HIGH).take(count)


def tokens_of(found: list[dict]) -> list[int]:
    return [t for e in found for c in e.get("choices", []) for t in c.get("token_ids") or []]


def reasons_of(found: list[dict]) -> list[str]:
    return [c["finish_reason"] for e in found for c in e.get("choices", []) if c.get("finish_reason")]


async def events(
    http: httpx.AsyncClient, body: dict[str, Any], path: str = COMPLETION
) -> tuple[int, list[dict], bool, int]:
    """Status, events, whether [DONE] came, comments."""
    found: list[dict] = []
    done, comments = False, 0
    async with http.stream("POST", path, json=body | {"stream": True}) as response:
        if response.status_code != 200:
            return response.status_code, [json.loads(await response.aread())], False, 0
        async for line in response.aiter_lines():
            comments += line.startswith(":")
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                found.append(json.loads(line[6:]))
    return 200, found, done, comments
