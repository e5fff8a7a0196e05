"""API keys, tenants, namespaces of the prefix cache, and the context that the request runs in."""

from __future__ import annotations

import json
import logging

import httpx
import pytest

from cluster.config import RouterConfig, TenantsConfig
from cluster.errors import ConfigError
from cluster.messages import Slo
from router.gateway.context import RequestContext, current
from router.gateway.keys import ApiKeys, KeyFile, KeyRing
from router.gateway.salt import namespace_salt
from router.gateway.stack import guard

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
KEY_A, KEY_B = "sk-aaaaaaaa-1", "sk-bbbbbbbb-2"
KEYS = {"PDSERVE_KEYS": f"{KEY_A} a, {KEY_B} b"}


class Behind:
    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.contexts: list[RequestContext] = []
        self.headers: list[dict[bytes, bytes]] = []

    async def __call__(self, scope, receive, send) -> None:
        body = (await receive())["body"] if scope["method"] == "POST" else b""
        self.bodies.append(json.loads(body) if body else {})
        self.contexts.append(current())
        self.headers.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def client(app: Behind, environ: dict[str, str] | None = None, **tenants: object) -> httpx.AsyncClient:
    config = RouterConfig(tenants=tenants)
    guarded = guard(app, config, vocab_size=100, slo=Slo(1, 0.1, 0.3), environ=environ or {})
    return httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://router")


@pytest.mark.parametrize(
    "headers, tenant",
    [
        ({"authorization": f"Bearer {KEY_A}"}, "a"),
        ({"authorization": f"bearer {KEY_B}"}, "b"),
        ({"x-api-key": KEY_B}, "b"),
    ],
)
async def test_a_key_names_its_tenant_and_goes_no_further(headers: dict[str, str], tenant: str) -> None:
    app = Behind()
    async with client(app, KEYS, api_keys_env="PDSERVE_KEYS") as http:
        response = await http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert response.status_code == 200
    assert app.contexts[0].tenant == tenant
    assert not {b"authorization", b"x-api-key"} & app.headers[0].keys()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": f"Basic {KEY_A}"},
        {"authorization": KEY_A},
        {"authorization": f"Bearer {KEY_A}x"},
        {"authorization": f"Bearer {KEY_A[:-1]}"},
        {"authorization": "Bearer \xff\xfe"},
        {"x-api-key": "wrong-wrong"},
        {"x-tenant-id": "a"},
    ],
)
async def test_without_a_known_key_nothing_is_served(headers: dict, caplog: pytest.LogCaptureFixture) -> None:
    app = Behind()
    caplog.set_level(logging.DEBUG)
    raw = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
    async with client(app, KEYS, api_keys_env="PDSERVE_KEYS") as http:
        for path in ("/v1/chat/completions", "/tokenize"):
            response = await http.post(path, json=CHAT, headers=raw)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["type"] == "AuthenticationError"
            assert KEY_A not in response.text
        assert (await http.get("/v1/models", headers=raw)).status_code == 401
        assert (await http.get("/health")).status_code == 200
    assert KEY_A not in caplog.text
    assert len(app.bodies) == 1


async def test_a_header_given_twice_is_refused() -> None:
    app = Behind()
    async with client(app, KEYS, api_keys_env="PDSERVE_KEYS") as http:
        twice = [("authorization", f"Bearer {KEY_A}"), ("authorization", f"Bearer {KEY_B}")]
        assert (await http.post("/v1/chat/completions", json=CHAT, headers=twice)).status_code == 400
    assert app.bodies == []


@pytest.mark.parametrize("path", ["/pdserve/status", "/pdserve/records"])
async def test_pages_that_show_all_tenants_are_for_operators(path: str) -> None:
    config = RouterConfig(tenants={"api_keys_env": "PDSERVE_KEYS", "operators": ["b"]})
    app = Behind()
    guarded = guard(app, config, vocab_size=100, slo=Slo(1, 0.1), environ=KEYS, extra_paths=[path])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://router") as http:
        assert (await http.get(path)).status_code == 401
        refused = await http.get(path, headers={"x-api-key": KEY_A})
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "PermissionDeniedError")
        assert app.bodies == []
        assert (await http.get(path, headers={"x-api-key": KEY_B})).status_code == 200


@pytest.mark.parametrize("tenant, status", [("operator", 200), ("someone", 403)])
async def test_a_trusted_header_may_name_an_operator(tenant: str, status: int) -> None:
    guarded = guard(
        Behind(),
        RouterConfig(tenants={"header": "x-tenant-id"}),
        vocab_size=100,
        slo=Slo(1, 0.1),
        environ={},
        extra_paths=["/pdserve/status"],
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://router") as http:
        assert (await http.get("/pdserve/status", headers={"x-tenant-id": tenant})).status_code == status


async def test_without_tenants_everybody_may_read_the_status() -> None:
    guarded = guard(
        Behind(), RouterConfig(), vocab_size=100, slo=Slo(1, 0.1), environ={}, extra_paths=["/pdserve/status"]
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://router") as http:
        assert (await http.get("/pdserve/status")).status_code == 200


async def test_a_trusted_header_names_the_tenant() -> None:
    app = Behind()
    async with client(app, header="x-tenant-id") as http:
        assert (await http.post("/v1/chat/completions", json=CHAT, headers={"x-tenant-id": "org-1"})).status_code == 200
        for wrong in ("", "a b", "x" * 65, "a/b"):
            response = await http.post("/v1/chat/completions", json=CHAT, headers={"x-tenant-id": wrong})
            assert response.status_code == 401
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 401
    assert [c.tenant for c in app.contexts] == ["org-1"]


async def test_without_keys_there_is_one_tenant_and_one_shared_cache() -> None:
    app = Behind()
    async with client(app) as http:
        await http.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer anything"})
    assert (app.contexts[0].tenant, app.contexts[0].cache_salt) == ("default", None)
    assert app.bodies == [CHAT]


async def test_tenants_never_share_a_namespace_and_a_client_salt_only_narrows_it() -> None:
    """Kind: tenant isolation of the prefix cache."""
    app = Behind()
    async with client(app, KEYS, api_keys_env="PDSERVE_KEYS") as http:
        for key in (KEY_A, KEY_B):
            for salt in (None, "s1", namespace_salt("a", None)):
                body = CHAT if salt is None else CHAT | {"cache_salt": salt}
                for path in ("/v1/chat/completions", "/v1/messages"):
                    await http.post(path, json=body | {"max_tokens": 3}, headers={"x-api-key": key})
    salts = [c.cache_salt for c in app.contexts]
    assert salts[0::2] == salts[1::2]
    assert len({*salts[0::2]}) == 6
    assert [b.get("cache_salt") for b in app.bodies[0::2]] == salts[0::2]
    assert not any("cache_salt" in b for b in app.bodies[1::2])
    assert app.contexts[0].cache_salt == namespace_salt("a", None)


def test_namespaces_are_framed() -> None:
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("abc", None), ("", "abc"), ("org_1", "2345"), ("org_12345", "")]
    salts = {namespace_salt(*pair) for pair in pairs}
    assert len(salts) == len(pairs)
    assert all(len(s) == 43 and s.replace("-", "").replace("_", "").isalnum() for s in salts)


async def test_transfer_parameters_of_a_client_are_dropped() -> None:
    app = Behind()
    async with client(app) as http:
        body = CHAT | {"kv_transfer_params": {"remote_host": "evil"}, "ec_transfer_params": {}}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert app.bodies == [CHAT]
    assert app.headers[0][b"content-length"] == str(len(json.dumps(CHAT, separators=(",", ":")))).encode()


@pytest.mark.parametrize("name", ["x-vllm-priority", "X-Data-Parallel-Rank"])
async def test_headers_that_steer_vllm_past_the_bodys_checks_are_dropped(name: str) -> None:
    app = Behind()
    async with client(app) as http:
        response = await http.post("/v1/chat/completions", json=CHAT, headers={name: str(2**70), "x-other": "1"})
    assert response.status_code == 200
    assert name.lower().encode() not in app.headers[0]
    assert app.headers[0][b"x-other"] == b"1"


async def test_slo_headers_and_request_id_reach_the_context() -> None:
    app = Behind()
    async with client(app) as http:
        both = {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "12.5", "x-request-id": "abc-1"}
        await http.post("/v1/chat/completions", json=CHAT, headers=both)
        await http.post("/v1/chat/completions", json=CHAT, headers={"x-slo-tpot-ms": "40"})
        await http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": ""})
    assert [c.slo for c in app.contexts] == [Slo(0.25, 0.0125, 0.3), Slo(1, 0.04, 0.3), None]
    assert [c.client_request_id for c in app.contexts] == ["abc-1", None, None]
    assert all(c.arrival_s is not None for c in app.contexts)


async def test_concurrent_requests_keep_their_own_context() -> None:
    import asyncio

    gate = asyncio.Barrier(20)
    seen: dict[str, str | None] = {}

    async def app(scope, receive, send) -> None:
        mine = dict(scope["headers"])[b"x-request-id"].decode()
        await gate.wait()
        seen[mine] = current().client_request_id
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async with client(app) as http:  # type: ignore[arg-type]
        await asyncio.gather(
            *(http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": f"r{i}"}) for i in range(20))
        )
    assert seen == {f"r{i}": f"r{i}" for i in range(20)}
    assert current() == RequestContext()


@pytest.mark.parametrize(
    "pairs, problem",
    [
        (["only-one-word"], "entry 1 has 1 words"),
        (["", "# a comment", "a b c d"], "entry 3 has 4 words"),
        (["short a"], "has 5 characters, fewer than 8"),
        (["long-enough-key a/b"], "the tenant of entry 1 is 'a/b'"),
        (["long-enough-key a", "long-enough-key b"], "the key of entry 2 belongs to another tenant"),
        (["", "# nothing"], "holds no key"),
    ],
)
def test_mistakes_in_keys_name_the_entry_and_never_the_key(pairs: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as mistake:
        ApiKeys.parse(pairs, "router.tenants.api_keys_file")
    assert "long-enough-key" not in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_a_key_may_be_listed_twice_for_one_tenant_and_its_object_shows_nothing() -> None:
    keys = ApiKeys.parse([f"{KEY_A} a", f"  {KEY_A}\ta "], "x")
    assert (len(keys), keys.tenant(KEY_A), keys.tenant(KEY_A + " ")) == (1, "a", None)
    assert KEY_A not in repr(keys)
    assert KEY_A not in str(vars(keys))


def test_a_missing_source_is_one_line() -> None:
    with pytest.raises(ConfigError, match="the variable NOWHERE is not set; set or remove it"):
        KeyRing.from_config(TenantsConfig(api_keys_env="NOWHERE"), {})
    with pytest.raises(ConfigError, match=r"router\.tenants\.api_keys_file: .* cannot be read"):
        KeyRing.from_config(TenantsConfig(api_keys_file="/nowhere/keys"), {})
    assert KeyRing.from_config(TenantsConfig(), {}) is None


def test_file_and_variable_are_both_asked(tmp_path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY_A} a\n")
    ring = KeyRing.from_config(TenantsConfig(api_keys_file=str(file), api_keys_env="K"), {"K": f"{KEY_B} b"})
    assert ring is not None
    assert [ring.tenant(key, 0.0) for key in (KEY_A, KEY_B, "neither-of-them")] == ["a", "b", None]


def test_a_rotated_file_takes_effect_and_a_broken_one_does_not(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY_A} a\n")
    keys = KeyFile(file, check_every_s=5.0)
    assert keys.keys(0.0).tenant(KEY_A) == "a"
    file.write_text(f"# rotated\n{KEY_B} b\n")
    assert keys.keys(4.9).tenant(KEY_B) is None
    assert keys.keys(5.0).tenant(KEY_B) == "b"
    assert keys.keys(5.0).tenant(KEY_A) is None
    file.write_text("broken\n")
    assert keys.keys(10.0).tenant(KEY_B) == "b"
    file.unlink()
    assert keys.keys(15.0).tenant(KEY_B) == "b"
    assert "API keys kept as they were" in caplog.text
    assert KEY_B not in caplog.text
