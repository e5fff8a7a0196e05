"""`pdserve demo`: one chat through a real prefill engine, a real KV transfer and a real decode engine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.commands.output import err, out, print_json
from cluster.commands.waiting import Waiting
from cluster.errors import ConfigError, UserError

if TYPE_CHECKING:
    from cluster.config import ClusterConfig

QUESTION = "What is a KV cache?"
DEFAULTS: dict[str, Any] = {
    # Always the split, however short the prompt: that is what there is to see.
    "router": {"placement": {"conditional": False}},
    "model": {"dtype": "float32"},
}


def command(
    prompt: Annotated[str, typer.Argument(help="what to ask")] = QUESTION,
    config: Annotated[Path | None, typer.Option(help="a cluster YAML instead of 1 prefill + 1 decode engine")] = None,
    model: Annotated[str | None, typer.Option(help="embedded, smollm2, a Hugging Face id or a path")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; default: any free one")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="length of the answer")] = 64,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object instead")] = False,
) -> None:
    """Start everything, send one chat, stream the answer, print where the time went, and clean up.

    The embedded model has 2.9 M parameters and was trained for this: it answers what it knows and babbles otherwise.

    Example: pdserve demo "What is the capital of Japan?"
    """
    from rich.text import Text

    from cluster.commands.settings import load_config
    from cluster.runtime.local import free_port, start

    resolved = _without_keys(load_config(config, port=port or free_port("127.0.0.1"), model=model, defaults=DEFAULTS))
    with Waiting("starting 1 router, prefill and decode engines") as waiting:
        cluster = start(resolved, progress=waiting)
    try:
        err.print(f"ready after {cluster.ready_s['total']:.0f} s at {cluster.url}/v1")
        if not json_:
            out.print(Text.assemble("\n", (">", "bold"), " ", prompt))
        answer = _ask(cluster.url, resolved.model.served_name or resolved.model.id, prompt, max_tokens, quiet=json_)
        record = _record(cluster.url)
    finally:
        with Waiting("stopping") as waiting:
            cluster.stop(progress=waiting)
    result = summary(answer, record)
    if json_:
        print_json(result)
    else:
        out.print(timeline(result, record))


def _without_keys(config: ClusterConfig) -> ClusterConfig:
    tenants = config.router.tenants
    for name in ("api_keys_file", "api_keys_env", "header"):
        if getattr(tenants, name) is not None:
            raise ConfigError(
                f"router.tenants.{name}", "the demo says nothing of who asks", "leave it out for the demo"
            )
    return config


def _ask(url: str, model: str, prompt: str, max_tokens: int, *, quiet: bool) -> str:
    from openai import APIError, OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    parts = []
    try:
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
        )
        for chunk in stream:
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                parts.append(text)
                if not quiet:
                    sys.stdout.write(text)
                    sys.stdout.flush()
    except APIError as e:
        raise UserError(f"the question was not answered: {e.message}") from None
    if not quiet:
        sys.stdout.write("\n\n")
    return "".join(parts)


def _record(url: str) -> dict[str, Any]:
    """The router's record of the request; it is written in the moment the stream ends."""
    import httpx

    deadline = time.monotonic() + 10
    while True:
        records = httpx.get(f"{url}/pdserve/records", timeout=10).json()
        if records:
            last: dict[str, Any] = records[-1]
            return last
        if time.monotonic() > deadline:
            raise UserError("router.replicas: the router that was asked has no record of it; the demo wants one router")
        time.sleep(0.05)


def summary(answer: str, record: dict[str, Any]) -> dict[str, Any]:
    """The figures of `--json`."""
    stages = record["stage_s"]
    return {
        "answer": answer,
        "path": record["path"],
        "ttft_ms": _ms(record["ttft_s"]),
        "tpot_ms": _ms(record["tpot_s"]),
        "queue_ms": _ms(sum(stages.get(s, 0.0) for s in ("router_queue", "prefill_queue", "decode_queue"))),
        "prefill": {
            "replica": record["prefill_worker"],
            "computed_tokens": record["prompt_tokens"] - record["cached_tokens"],
            "cached_tokens": record["cached_tokens"],
            "ms": _ms(stages.get("prefill_compute")),
        },
        "transfer": {
            "blocks": record["transfer_blocks"],
            "bytes": record["transfer_bytes"],
            "ms": _ms(stages.get("kv_transfer")),
        },
        "decode": {
            "replica": record["decode_worker"],
            "tokens": record["output_tokens"],
            "computed_prompt_tokens": record["decode_computed_tokens"],
        },
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def timeline(result: dict[str, Any], record: dict[str, Any]) -> Any:
    """Where the time to the first token went, as bars."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    prefill, transfer, decode = result["prefill"], result["transfer"], result["decode"]
    notes = {
        "router_queue": "tokenized, placed",
        "prefill_queue": "call, wait",
        "prefill_compute": f"{prefill['replica']}: {prefill['computed_tokens']} tokens,"
        f" {prefill['cached_tokens']} cached",
        "kv_transfer": f"{transfer['blocks']} block(s), {transfer['bytes']:,} bytes",
        "decode_queue": "call, wait",
        "decode_step": f"{decode['replica']}: first token",
    }
    table = Table(
        show_header=True, title="time to the first token", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    table.add_column("stage")
    table.add_column("ms", justify="right")
    table.add_column("")
    table.add_column("what")
    total = max(1e-9, sum(record["stage_s"].values()))
    offset = 0.0
    for stage, note in notes.items():
        seconds = record["stage_s"].get(stage)
        if seconds is None:
            continue
        width = 24
        start, end = round(width * offset / total), round(width * (offset + seconds) / total)
        offset += seconds
        table.add_row(
            stage.replace("_", " "), f"{1e3 * seconds:.1f}", " " * start + "█" * max(1, end - start), Text(note)
        )
    tpot = f"{result['tpot_ms']:.1f} ms" if result["tpot_ms"] is not None else "-"
    ttft = f"{result['ttft_ms']:.1f} ms" if result["ttft_ms"] is not None else "-"
    last = f"TTFT {ttft}, then {decode['tokens']} tokens with TPOT {tpot} on replica {decode['replica']}"
    return Group(table, Text(last))
