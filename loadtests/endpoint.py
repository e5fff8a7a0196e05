"""The endpoint under test and the bytes of one request to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from cluster.errors import ConfigError
from cluster.workload.arrival import Prompt
from cluster.workload.text import TextWriter

Api = Literal["chat", "completions", "tokens"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go and how they are written.

    Attributes:
        api: `chat` (messages), `completions` (a text prompt) or `tokens` (token ids to /v1/completions).
        exact_output: ask for exactly the workload's output length (`ignore_eos`, `min_tokens`; vLLM's extensions).
        counts: ask for a token count with each chunk (`continuous_usage_stats`, vLLM's extension).
        tenant_header: header that carries the tenant, None to send none.
        tenant_keys: API key per tenant; `api_key` for those that have none.
        cache_salt: a namespace of the prefix cache, None for the common one: requests share nothing with those of
            another (vLLM's extension).
    """

    url: str
    model: str
    api: Api = "chat"
    exact_output: bool = True
    counts: bool = True
    temperature: float = 0.0
    api_key: str | None = None
    tenant_header: str | None = "x-tenant-id"
    tenant_keys: dict[str, str] = field(default_factory=dict)
    cache_salt: str | None = None

    @property
    def host(self) -> str:
        return split_url(self.url)[1]

    @property
    def port(self) -> int:
        return split_url(self.url)[2]

    @property
    def tls(self) -> bool:
        return split_url(self.url)[0] == "https"

    @property
    def path(self) -> str:
        return split_url(self.url)[3] + ("/v1/chat/completions" if self.api == "chat" else "/v1/completions")

    @property
    def authority(self) -> str:
        """Host and port as a `host` header has them."""
        return f"{_bracketed(self.host)}:{self.port}"


def split_url(url: str, option: str = "--host") -> tuple[str, str, int, str]:
    """Scheme, host, port and path prefix. Raises ConfigError for anything but http(s)://host[:port][/prefix]."""
    try:
        parts = urlsplit(url if "//" in url else "http://" + url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as e:
        raise ConfigError(option, f"{url!r}: {e}", "e.g. http://127.0.0.1:8000") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(option, f"{url!r} is no http or https address", "e.g. http://127.0.0.1:8000")
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1")


def base_url(url: str, option: str = "--host") -> str:
    """The address that paths are appended to, with its port. Raises ConfigError as `split_url` does."""
    scheme, host, port, prefix = split_url(url, option)
    return f"{scheme}://{_bracketed(host)}:{port}{prefix}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def header_text(field: str, value: str, *, charset: Literal["ascii", "latin-1"] = "latin-1") -> str:
    """`value`, which a header can carry. Raises ConfigError for any other; it names `field` and not the value, which
    may be a secret."""
    try:
        value.encode(charset)
    except UnicodeEncodeError as e:
        problem = f"character {e.start + 1} is not {charset.upper()}, and HTTP headers carry nothing else"
        raise ConfigError(field, problem, "use letters, digits and punctuation of ASCII") from None
    if not value.isprintable():
        raise ConfigError(field, "holds a character that is not printable, such as a line end", "remove it")
    return value


@dataclass(slots=True)
class RequestWriter:
    """Turns prompts into HTTP requests. Pure: the same arguments give the same bytes."""

    endpoint: Endpoint
    text: TextWriter

    def body(self, prompt: Prompt, output_tokens: int, *, alternate: bool = False, priority: int = 0) -> bytes:
        e = self.endpoint
        body: dict[str, object] = {"model": e.model, "stream": True, "temperature": e.temperature}
        if e.api == "chat":
            body["messages"] = self.text.messages(prompt, alternate=alternate)
        elif e.api == "completions":
            body["prompt"] = self.text.text(prompt)
        else:
            body["prompt"] = self.text.token_ids(prompt)
        body["max_completion_tokens" if e.api == "chat" else "max_tokens"] = output_tokens
        body["stream_options"] = {"include_usage": True} | ({"continuous_usage_stats": True} if e.counts else {})
        if e.exact_output:
            body |= {"ignore_eos": True, "min_tokens": output_tokens}
        if priority:
            body["priority"] = priority
        if e.cache_salt is not None:
            body["cache_salt"] = e.cache_salt
        return msgspec.json.encode(body)

    def request(self, body: bytes, *, request_id: str, tenant: str = "default") -> bytes:
        """Head and body, ready for the socket."""
        e = self.endpoint
        lines = [
            f"POST {e.path} HTTP/1.1",
            f"host: {e.authority}",
            "content-type: application/json",
            "accept: text/event-stream",
            f"x-request-id: {request_id}",
            f"content-length: {len(body)}",
        ]
        key = e.tenant_keys.get(tenant, e.api_key)
        if key:
            lines.append(f"authorization: Bearer {key}")
        if e.tenant_header:
            lines.append(f"{e.tenant_header}: {tenant}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
