"""What a client's `priority` may be: where tenants are told apart, none that steps before all others."""

from __future__ import annotations

import json

import httpx
import pytest

from cluster.config import RouterConfig
from cluster.messages import Slo
from router.gateway.stack import guard

BODIES = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/responses": {"model": "m", "input": "hi"},
}


async def passed_on(path: str, priority: object, tenant: str = "a", **tenants: object) -> object:
    """The priority that reaches vLLM's layer; "absent" where there is none."""
    seen: list[dict] = []

    async def behind(scope, receive, send) -> None:
        seen.append(json.loads((await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    app = guard(behind, RouterConfig(tenants=tenants), vocab_size=100, slo=Slo(1, 0.1), environ={})
    body = BODIES[path] if priority == "absent" else BODIES[path] | {"priority": priority}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
        assert (await http.post(path, json=body, headers={"x-tenant-id": tenant})).status_code == 200
    return seen[0].get("priority", "absent")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("given, kept", [(-1, 0), (-(2**63), 0), (0, 0), (7, 7), (None, None), ("absent", "absent")])
async def test_a_priority_before_the_others_counts_as_the_first_that_is_allowed(path, given, kept) -> None:
    assert await passed_on(path, given, header="x-tenant-id") == kept


async def test_the_limit_is_the_operators_and_binds_no_operator() -> None:
    path = "/v1/completions"
    assert await passed_on(path, -9, header="x-tenant-id", priority_min=-5) == -5
    assert await passed_on(path, -3, header="x-tenant-id", priority_min=-5) == -3
    assert await passed_on(path, 2, header="x-tenant-id", priority_min=3) == 3
    assert await passed_on(path, -9, tenant="operator", header="x-tenant-id") == -9
    assert await passed_on(path, -9, tenant="boss", header="x-tenant-id", operators=["boss"]) == -9


async def test_one_tenant_alone_orders_its_requests_as_it_likes() -> None:
    assert await passed_on("/v1/completions", -9, tenant="operator") == -9
    assert await passed_on("/v1/completions", -9, tenant="anyone") == -9
