"""What is at an address: the model it serves, how long its prompts may be, and the server's own records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from cluster.errors import ConfigError, UserError
from loadtests.endpoint import base_url, header_text


@dataclass(frozen=True, slots=True)
class Served:
    """An endpoint's answer about itself. `max_model_len` is None where it does not say."""

    base_url: str
    model: str
    max_model_len: int | None


def discover(
    url: str, model: str | None = None, api_key: str | None = None, *, key_option: str = "--api-key"
) -> Served:
    """Ask `/v1/models`.

    Args:
        key_option: what the user calls `api_key`, for messages.

    Raises:
        UserError: nobody answers there, it does not serve `model`, or no header can carry `api_key`.
    """
    base = base_url(url)
    try:
        answer = httpx.get(f"{base}/v1/models", headers=_headers(api_key), timeout=20)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise UserError(f"--host: {base} does not answer ({e}); start one with `pdserve serve`") from None
    if answer.status_code in (401, 403):
        why = "accepts no request without a key" if not api_key else "does not accept this key"
        raise ConfigError(key_option, f"{base} {why} ({answer.status_code})", "give one, or set PDSERVE_API_KEY")
    if answer.status_code != 200:
        raise UserError(f"--host: {base}/v1/models answered {answer.status_code}; is this an OpenAI endpoint?")
    try:
        models = {str(m["id"]): m for m in answer.json()["data"]}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--host: {base}/v1/models gave no list of models; is this an OpenAI endpoint?") from None
    name = model or next(iter(models), "")
    if name not in models:
        raise UserError(f"--model: {name!r} is not served at {base}; it serves {', '.join(models) or 'nothing'}")
    length = models[name].get("max_model_len")
    return Served(base, name, length if isinstance(length, int) else None)


def _headers(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {header_text('--api-key', api_key, charset='ascii')}"} if api_key else {}


def fetch_json(base: str, path: str, api_key: str | None = None) -> Any:
    """A page of pdserve's own; None where the endpoint has no such page (it is another server).

    Raises:
        ConfigError: no header can carry `api_key`.
    """
    headers = _headers(api_key)
    try:
        answer = httpx.get(base + path, headers=headers, timeout=30)
        return answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


def fetch_records(base: str, api_key: str | None = None) -> list[dict[str, Any]]:
    """The records of the requests that a router finished last; empty for other servers."""
    raw = fetch_json(base, "/pdserve/records", api_key)
    return raw if isinstance(raw, list) else []
