"""Where `pdserve diagnose` gets its evidence: a live cluster, a load test's folder, an experiment's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import SloConfig
from cluster.diagnosis.evidence import Evidence, from_mapping, gather
from cluster.diagnosis.prompt_order import prompt_evidence
from cluster.diagnosis.segments import segment
from cluster.errors import UserError
from cluster.messages import Slo
from loadtests.discover import fetch_json, fetch_records
from loadtests.endpoint import base_url
from loadtests.server_side import engine_numbers
from loadtests.tokenizer import find_tokenizer

MAX_PROMPTS = 2000
FEW = "fewer than 20 requests have ended there; let it serve for a while, or run a load test"


@dataclass(frozen=True, slots=True)
class Source:
    """Evidence of one run. `name` tells the runs of an experiment apart."""

    name: str
    evidence: Evidence
    note: str = ""


def read(source: str, api_key: str | None = None) -> list[Source]:
    """Evidence from an address or a folder.

    Raises:
        UserError: there is nothing to diagnose at `source`.
    """
    if Path(source).exists():
        return read_folder(Path(source))
    if "://" in source or ":" in source:
        return [read_cluster(source, api_key)]
    raise UserError(f"SOURCE: {source!r} is no folder here and no address; give http://host:port or a report's folder")


def read_folder(path: Path) -> list[Source]:
    """A load test's or an experiment's `results.json`."""
    file = path / "results.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"SOURCE: {file} cannot be read ({e.strerror}); give the folder of a report") from None
    except ValueError:
        raise UserError(f"SOURCE: {file} is not JSON; give the folder of a report") from None
    if isinstance(raw, dict) and isinstance(raw.get("evidence"), dict):
        invalid = "" if raw.get("validity", {}).get("valid", True) else "the load test itself is marked invalid"
        return [Source(str(raw.get("scenario", {}).get("name", file.parent.name)), _numbers(raw["evidence"]), invalid)]
    runs = raw.get("runs") if isinstance(raw, dict) else None
    found = [
        Source(str(run.get("name", number)), _numbers(run["evidence"]))
        for number, run in enumerate(runs or [])
        if isinstance(run, dict) and isinstance(run.get("evidence"), dict)
    ]
    if not found:
        raise UserError(
            f"SOURCE: {file} holds no evidence; it must come from `pdserve loadtest` or `pdserve experiment`"
        )
    return found


def _numbers(raw: dict[str, Any]) -> Evidence:
    return {k: float(v) for k, v in raw.items() if isinstance(v, (int, float))}


def read_prompts(path: Path, tokenizer: str | None = None) -> Source:
    """A log of prompts: JSON lines with `prompt` (text), or `messages` as in chat requests, or plain text lines.

    Tokens are the tokenizer's where one is named, otherwise (None or `words`) words: positions and savings are then in
    words.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--prompts: {path} cannot be read ({e}); give a file of JSON lines") from None
    texts = [_text_of(line) for line in lines[:MAX_PROMPTS]]
    if len(texts) < 20:
        raise UserError(f"--prompts: {path} holds {len(texts)} prompts, fewer than 20; give more of the log")
    if tokenizer is None or tokenizer == "words":
        prompts = segment([text.split() for text in texts])
        note = "no --tokenizer: counted in words" if tokenizer is None else "counted in words"
    else:
        encode = find_tokenizer(tokenizer, tokenizer).encode
        prompts, note = segment([encode(text, add_special_tokens=False) for text in texts]), ""
    return Source(path.name, {"requests": float(len(texts))} | prompt_evidence(prompts), note)


def _text_of(line: str) -> str:
    try:
        raw = json.loads(line)
    except ValueError:
        return line
    if isinstance(raw, dict) and isinstance(raw.get("messages"), list):
        return "\n".join(f"{m.get('role')}\n{m.get('content')}" for m in raw["messages"] if isinstance(m, dict))
    prompt = raw.get("prompt") if isinstance(raw, dict) else raw
    return prompt if isinstance(prompt, str) else line


def read_cluster(url: str, api_key: str | None = None) -> Source:
    """The latest requests of a running cluster, by its own records."""
    base = base_url(url)
    status = fetch_json(base, "/pdserve/status", api_key)
    if not isinstance(status, dict):
        raise UserError(f"SOURCE: no pdserve cluster answers at {base}; start one with `pdserve serve`")
    records = [from_mapping(r) for r in fetch_records(base, api_key)]
    slo = records[-1].slo if records else _default_slo()
    note = FEW if len(records) < 20 else "gaps between tokens are not kept by routers: stalls need a load test"
    return Source(str(status.get("name", base)), gather(records, slo, engine=engine_numbers(status)), note)


def _default_slo() -> Slo:
    return SloConfig().to_slo()
