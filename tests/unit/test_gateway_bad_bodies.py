"""Every bad request of the table ends at the gateway with its status and the field named; the app is not called."""

from __future__ import annotations

import json
import random

import httpx
import pytest
from bad_bodies import GOOD, TABLE, VOCAB, Bad

from cluster.config import RouterConfig
from cluster.messages import Slo
from router.gateway.fields import BodyLimits
from router.gateway.stack import guard


class Behind:
    """The application behind the gateway; keeps what reaches it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope, receive, send) -> None:
        message = await receive()
        self.bodies.append(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"{}"})


def client(app: Behind, **config: object) -> httpx.AsyncClient:
    guarded = guard(app, RouterConfig(**config), vocab_size=VOCAB, slo=Slo(1, 0.1), environ={})
    return httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://router")


def strict(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def assert_error(response: httpx.Response) -> dict:
    body = strict(response.text)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) < 400
    assert "\n" not in error["message"]
    return error


def test_the_table_is_large_and_its_names_are_unique() -> None:
    assert len(TABLE) >= 150
    assert len({bad.name for bad in TABLE}) == len(TABLE)


@pytest.mark.parametrize("bad", [b for b in TABLE if b.by == "gateway"], ids=str)
async def test_a_bad_request_ends_here(bad: Bad) -> None:
    app = Behind()
    async with client(app) as http:
        response = await http.request(bad.method, bad.path, content=bad.body, headers=bad.headers)
        assert response.status_code == bad.status, response.text
        assert assert_error(response)["param"] == bad.param, response.text
        assert app.bodies == []
        good = await http.post("/v1/chat/completions", content=GOOD, headers={"content-type": "application/json"})
        assert good.status_code == 200


@pytest.mark.parametrize("bad", [b for b in TABLE if b.by != "gateway"], ids=str)
async def test_what_vllm_judges_reaches_it(bad: Bad) -> None:
    app = Behind()
    async with client(app) as http:
        response = await http.request(bad.method, bad.path, content=bad.body, headers=bad.headers)
    assert response.status_code == 200
    assert app.bodies == [bad.body]


async def test_a_body_above_the_cap_is_refused_by_its_claim_and_by_its_bytes() -> None:
    app = Behind()

    async def pieces():
        for _ in range(20):
            yield b" " * 100

    async with client(app, http={"max_body_bytes": 1024}) as http:
        kind = {"content-type": "application/json"}
        for content in (b" " * 1025, pieces()):
            response = await http.post("/v1/completions", content=content, headers=kind)
            assert response.status_code == 413
            assert "1024" in assert_error(response)["message"]
        claimed = await http.post("/v1/completions", content=pieces(), headers=kind | {"content-length": "99999999999"})
        assert claimed.status_code == 413
        odd = await http.post("/v1/completions", content=pieces(), headers=kind | {"content-length": "-5"})
        assert (odd.status_code, odd.json()["error"]["param"]) == (400, "content-length")
    assert app.bodies == []


async def test_random_bytes_and_random_json_never_raise() -> None:
    rng = random.Random(3)
    names = ["model", "messages", "prompt", "n", "stop", "logit_bias", "stop_token_ids", "cache_salt", "stream"]
    names += ["max_tokens", "max_completion_tokens", "min_tokens", "vllm_xargs", "kv_transfer_params", "echo"]
    names += ["stream_options", "chat_template_kwargs", "tokens"]

    def value(depth: int = 0):
        kind = rng.randrange(9 if depth < 4 else 7)
        if kind == 7:
            return [value(depth + 1) for _ in range(rng.randrange(4))]
        if kind == 8:
            return {rng.choice(names): value(depth + 1) for _ in range(rng.randrange(3))}
        return rng.choice([None, True, 0, -1, 2**90, 1.5, "", "x", "\x00", {}, [], "5"])

    app = Behind()
    async with client(app) as http:
        for _ in range(600):
            if rng.random() < 0.1:
                body = rng.randbytes(rng.randrange(40))
            else:
                body = json.dumps({rng.choice(names): value() for _ in range(rng.randrange(6))}).encode()
            path = rng.choice(["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/v1/messages"])
            response = await http.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400)
            if response.status_code == 400:
                assert_error(response)


def test_limits_follow_the_configuration() -> None:
    http = RouterConfig(http={"max_n": 2, "max_logprobs": 3, "max_stop": 4, "max_stop_chars": 5, "max_prompts": 6}).http
    assert BodyLimits.from_config(http, 100) == BodyLimits(100, 2, 3, 4, 5, 6, allow_chat_template=False)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 32, "stop": ["x"] * 16}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}], "stop": None, "n": None}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "\ud83d\ude00"}], "logit_bias": {"2047": -100}},
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "unknown_field": {"x": 1}}),
        ("/v1/completions", {"prompt": [0, 2047], "max_tokens": 0, "echo": True, "logprobs": 20}),
        ("/v1/completions", {"prompt": [[0], [2047]], "n": 2}),
        ("/v1/completions", {"prompt": ["a"] * 128}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stop_sequences": ["x"]}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [0, 2047]}),
    ],
)
async def test_good_bodies_pass_unchanged(path: str, body: dict) -> None:
    app = Behind()
    content = json.dumps({"model": "m"} | body).encode()
    async with client(app) as http:
        response = await http.post(path, content=content, headers={"content-type": "application/json; charset=utf-8"})
    assert response.status_code == 200, response.text
    assert app.bodies == [content]
