"""`pdserve plan`: what fits, what speculation gains, which topology to buy. Answers come from formulas, in seconds."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.commands.output import err, out, print_json
from cluster.errors import UserError

if TYPE_CHECKING:
    from cluster.perf.hardware import Hardware
    from cluster.perf.model_shape import ModelShape
    from cluster.planner.topology import Question, Rated
    from cluster.planner.verify import Verified

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Capacity, speculation and topology.")

Model = Annotated[
    str, typer.Option(help="llama-3.1-8b, llama-3.1-70b, llama-2-7b, qwen3-32b, or a folder with a config.json")
]
Gpu = Annotated[str, typer.Option(help="A100-40G, A100-80G, H100, H200, B200 or MI300X")]
Tp = Annotated[int, typer.Option(min=1, help="tensor parallelism of one replica")]
Pp = Annotated[int, typer.Option(min=1, help="pipeline stages of one replica")]
Weights = Annotated[str | None, typer.Option(help="data type of the weights, e.g. fp8, int4; default the model's")]
Kv = Annotated[str | None, typer.Option(help="data type of the KV cache, e.g. fp8; default 16 bits")]
Times = Annotated[str, typer.Option(help="step times: roofline, profile (needs --profile) or aiconfigurator")]
ProfileFile = Annotated[str | None, typer.Option("--profile", help="file written by `pdserve fit`")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]


def _table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """One line a row, as wide as its values: a folded table cannot be read, a long line can."""
    from cluster.planner.plots import show

    cells = [columns, *([show(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    print(title)
    for row in cells:
        aligned = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  " + "  ".join(aligned).rstrip())


def _model_and_gpu(model: str, gpu: str) -> tuple[ModelShape, Hardware]:
    from cluster.perf.hardware import hardware
    from cluster.perf.model_shape import model_shape

    return model_shape(model), hardware(gpu)


def _milliseconds(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{name}: {value} ms is not above 0")
    return value / 1e3


@app.command()
def capacity(
    model: Model,
    gpu: Gpu,
    tp: Tp = 1,
    pp: Pp = 1,
    context: Annotated[int, typer.Option(min=1, help="longest sequence: prompt and output tokens")] = 8192,
    mean_tokens: Annotated[int | None, typer.Option(help="tokens a running sequence holds; default a quarter")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="limit of one decode step, for the batch cap")] = None,
    weights: Weights = None,
    kv: Kv = None,
    utilization: Annotated[float, typer.Option(help="share of the GPU's memory that the engine may use")] = 0.92,
    block_tokens: Annotated[int, typer.Option(min=1, help="tokens of a KV block")] = 16,
    max_batched_tokens: Annotated[int, typer.Option(min=1, help="token budget of a step")] = 8192,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="the engine's own cap on sequences")] = 1024,
    times: Times = "roofline",
    profile: ProfileFile = None,
    json: Json = False,
) -> None:
    """Memory budget, concurrency and batch cap of one replica, and the resource that binds.

    Example: [bold]pdserve plan capacity --model llama-3.1-70b --gpu H100 --tp 4 --context 8192 --tpot-ms 40[/bold]
    """
    from cluster.perf.source import step_times
    from cluster.planner.capacity import GIB, EngineLimits, memory_budget
    from cluster.planner.capacity import capacity as plan

    if not 0 < utilization <= 1:
        raise UserError(f"utilization: {utilization} is outside (0, 1]")
    shape, device = _model_and_gpu(model, gpu)
    limits = EngineLimits(utilization, block_tokens, max_batched_tokens, max_num_seqs)
    budget = memory_budget(shape, device, tp, pp, weights, limits)
    tpot_s = _milliseconds("tpot-ms", tpot_ms)
    steps = step_times(times, shape, device, tp, pp, weights, kv, profile)
    mean = mean_tokens if mean_tokens is not None else max(1, context // 4)
    result = plan(shape, budget, context, mean, tp, pp, kv, limits, steps if tpot_s else None, tpot_s)
    if json:
        print_json(
            {
                "model": shape.name,
                "gpu": device.name,
                "tp": tp,
                "pp": pp,
                **{k: v for k, v in asdict(result).items() if k != "budget"},
                **{f"budget_{k}": v for k, v in asdict(budget).items()},
                "paged_over_contiguous": result.paged_over_contiguous,
            }
        )
        return
    memory = budget.memory_bytes
    parts = {
        "reserve": budget.reserve_bytes,
        "weights": budget.weights_bytes,
        "activations": budget.activation_bytes,
        "runtime and graphs": budget.runtime_bytes,
        "KV pool": budget.kv_pool_bytes,
    }
    _table(
        f"{shape.name} on {tp * pp} x {device.name} (tp {tp}, pp {pp}): one GPU's memory",
        ["part", "GiB", "share %"],
        [[name, size / GIB, 100 * size / memory] for name, size in parts.items()] + [["total", memory / GIB, 100.0]],
    )
    _table(
        "\nSequences of one replica",
        ["limit", "sequences", "at"],
        [
            ["contiguous", result.contiguous_sequences, f"{context} tokens reserved each"],
            [
                "paged",
                result.paged_sequences,
                f"{mean} tokens held each ({result.paged_over_contiguous:.1f} x contiguous)",
            ],
            ["max_num_seqs", max_num_seqs, "the engine's setting"],
            *([["TPOT", result.slo_batch_cap, f"{tpot_ms} ms a step"]] if tpot_s else []),
        ],
    )
    out.print(
        f"\nKV {result.kv_bytes_per_token:,} bytes a token and GPU, {result.pool_blocks:,} blocks = "
        f"{result.pool_tokens:,} tokens\n[bold]{result.concurrency} sequences; {result.binding} binds[/bold]"
    )


@app.command()
def speculative(
    model: Model,
    gpu: Gpu,
    acceptance: Annotated[float, typer.Option(help="probability that one drafted token is accepted")] = 0.7,
    tp: Tp = 1,
    context: Annotated[int, typer.Option(min=1, help="tokens of context a sequence holds")] = 2000,
    draft: Annotated[str | None, typer.Option(help="model that drafts; costed on the same GPUs")] = None,
    draft_cost: Annotated[float, typer.Option(help="a draft's step relative to a plain step, without --draft")] = 0.05,
    k_max: Annotated[int, typer.Option(min=1, max=32, help="most drafts a step")] = 8,
    weights: Weights = None,
    times: Times = "roofline",
    profile: ProfileFile = None,
    json: Json = False,
) -> None:
    """Best number of drafts, break-even acceptance, and the batch from which speculation loses.

    Example: [bold]pdserve plan speculative --model llama-3.1-70b --gpu H100 --tp 4 --acceptance 0.7[/bold]
    """
    from cluster.perf.model_shape import model_shape
    from cluster.perf.source import step_times
    from cluster.planner.speculative import plan_speculative

    if not 0 <= draft_cost < 10:
        raise UserError(f"draft-cost: {draft_cost} is outside [0, 10)")
    shape, device = _model_and_gpu(model, gpu)
    steps = step_times(times, shape, device, tp, 1, weights, None, profile)
    if draft:
        small = step_times("roofline", model_shape(draft), device, tp)

        def draft_step_s(batch: int) -> float:
            return small.step_s((), batch, batch * context)
    else:

        def draft_step_s(batch: int) -> float:
            return draft_cost * steps.step_s((), batch, batch * context)

    plan = plan_speculative(steps, acceptance, context, draft_step_s, k_max)
    if json:
        print_json(
            {
                "model": shape.name,
                "gpu": device.name,
                "tp": tp,
                "acceptance": acceptance,
                "best": [{"batch": b, "k": k, "speedup": s} for b, (k, s) in plan.best.items()],
                "per_k": [
                    {"k": k, "loss_batch": b, "rejected_share": plan.rejected_share[k]}
                    for k, b in plan.loss_batch.items()
                ],
                "points": [asdict(p) for p in plan.points],
            }
        )
        return
    alone = {p.k: p for p in plan.points if p.batch == 1}
    batches = sorted(plan.best)
    speed = {(p.batch, p.k): p.speedup for p in plan.points}
    _table(
        f"{shape.name}, {tp} x {device.name}, acceptance {acceptance}, {context} tokens of context: speed-up",
        [
            "drafts",
            *(f"batch {b}" if b == batches[0] else str(b) for b in batches),
            "break-even at 1",
            "loses from",
            "wasted %",
        ],
        [
            [
                k,
                *(f"{speed[b, k]:.2f}" for b in batches),
                alone[k].break_even,
                plan.loss_batch[k],
                100 * plan.rejected_share[k],
            ]
            for k in alone
        ],
    )
    for batch in (1, 32, 256):
        k, gain = plan.best[batch]
        out.print(
            f"batch {batch}: " + (f"[bold]k = {k}[/bold], {gain:.2f} x" if k else "[bold]off[/bold]: every k loses")
        )


def _gpus(text: str) -> dict[str, int]:
    """`H100:16` or `H100:8,A100-80G:8`."""
    from cluster.perf.hardware import hardware

    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        if not number.isdigit() or not 1 <= int(number) <= 1024:
            raise UserError(f"gpus: {part!r} is not TYPE:COUNT with a count in [1, 1024]; e.g. H100:16")
        name = hardware(name).name
        counts[name] = counts.get(name, 0) + int(number)
    return counts


def _sizes(name: str, text: str) -> tuple[int, ...]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdigit() and 1 <= int(size) <= 64 for size in sizes):
        raise UserError(f"{name}: {text!r} is not a list of sizes in [1, 64]; e.g. 1,2,4")
    return tuple(sorted({int(size) for size in sizes}))


@app.command()
def topology(
    model: Model,
    gpus: Annotated[str, typer.Option(help="what there is: H100:16, or two types: H100:8,A100-80G:8")],
    prompt: Annotated[int, typer.Option(min=1, help="prompt tokens")] = 4000,
    output: Annotated[int, typer.Option(min=2, help="output tokens")] = 500,
    cached: Annotated[int, typer.Option(min=0, help="prompt tokens that the prefix cache holds")] = 0,
    ttft_ms: Annotated[float, typer.Option(help="limit of the time to the first token")] = 2000,
    tpot_ms: Annotated[float, typer.Option(help="limit of the mean time per further token")] = 40,
    itl_max_ms: Annotated[float | None, typer.Option(help="longest gap between two tokens")] = None,
    attainment: Annotated[float, typer.Option(help="share of requests that must meet the limits")] = 0.9,
    weights: Weights = None,
    kv: Kv = None,
    link: Annotated[str, typer.Option(help="between replicas: rdma, nvlink or tcp")] = "rdma",
    tp: Annotated[str, typer.Option(help="tensor parallel sizes to search")] = "1,2,4,8",
    pp: Annotated[str, typer.Option(help="pipeline sizes to search")] = "1",
    times: Times = "roofline",
    profile: ProfileFile = None,
    only: Annotated[str | None, typer.Option(help="rate just this one: P4tp2+D2tp4, or C4tp4@512")] = None,
    rank: Annotated[str, typer.Option(help="gpu (goodput per GPU) or dollar (requests per dollar)")] = "gpu",
    top: Annotated[int, typer.Option(min=1, help="rows to show")] = 10,
    verify: Annotated[int, typer.Option(min=0, max=20, help="run this many of the best in the simulator")] = 0,
    out_dir: Annotated[Path | None, typer.Option("--out", help="folder for pareto.png and topology.html")] = None,
    json: Json = False,
) -> None:
    """Which topology serves the most requests within the SLO: colocated, chunked, or split with any P:D ratio.

    Example: [bold]pdserve plan topology --model llama-3.1-70b --gpus H100:16 --prompt 4000 --output 500[/bold]
    """
    from cluster.messages import Slo
    from cluster.perf.hardware import hardware
    from cluster.perf.model_shape import model_shape
    from cluster.planner.layout import parse_topology
    from cluster.planner.rates import Workload
    from cluster.planner.topology import Planner, Question, pareto

    if rank not in ("gpu", "dollar"):
        raise UserError(f"rank: {rank!r} is not known; use gpu or dollar")
    if not 0.5 <= attainment < 1:
        raise UserError(f"attainment: {attainment} is outside [0.5, 1)")
    if cached >= prompt:
        raise UserError(f"cached: {cached} is not below the {prompt} prompt tokens")
    counts = _gpus(gpus)
    slo = Slo(_milliseconds("ttft-ms", ttft_ms) or 0.0, _milliseconds("tpot-ms", tpot_ms) or 0.0)
    question = Question(
        shape=model_shape(model),
        gpus=counts,
        load=Workload(prompt, output, cached),
        slo=slo,
        attainment=attainment,
        times=times,
        profile=profile,
        weight_dtype=weights,
        kv_dtype=kv,
        link=link,
        itl_max_s=_milliseconds("itl-max-ms", itl_max_ms),
        tp=_sizes("tp", tp),
        pp=_sizes("pp", pp),
        model=model,
    )
    planner = Planner(question)
    single = parse_topology(only, list(counts)) if only else None
    with err.status("searching topologies") as status:
        answer = planner.search(lambda n: status.update(f"searching topologies: {n}"), single)
    rated = sorted(answer.rated, key=lambda e: -e.requests_per_dollar) if rank == "dollar" else answer.rated
    front = pareto(rated)
    verified = _verify(question, rated, verify)
    if out_dir is not None:
        _draw(rated, front, out_dir, question.shape.name, gpus, slo, prompt, output, top)
    if json:
        print_json(
            {
                "model": question.shape.name,
                "gpus": counts,
                "considered": answer.considered,
                "times": times,
                "attainment": attainment,
                "best": _entry(rated[0]),
                "best_split": _entry(answer.best("split")),
                "best_colocated": _entry(answer.best("colocated")),
                "top": [_entry(e) for e in rated[:top]],
                "pareto": [_entry(e) for e in front],
                "verified": [_checked(v) for v in verified],
                "impossible": answer.impossible,
            }
        )
        return
    title = (
        f"{question.shape.name} on {gpus}: {prompt} tokens in, {output} out, "
        f"TTFT {ttft_ms:g} ms, TPOT {tpot_ms:g} ms for {attainment:.0%} ({times})"
    )
    _table(title, COLUMNS, [_row(e) for e in rated[:top]])
    others = [e for e in (answer.best("split"), answer.best("colocated")) if e and e not in rated[:top]]
    if others:
        _table("\nBest of the other kind", COLUMNS, [_row(e) for e in others])
    _table("\nPareto front: speed of one user against goodput", COLUMNS, [_row(e) for e in front[:top]])
    if verified:
        _table(
            "\nIn the simulator: at the formulas' goodput, and the goodput the simulator itself finds",
            ["topology", "req/s", "attained %", "TTFT ms", "TTFT p95", "TPOT ms", "its req/s", "its tok/s/GPU"],
            [
                [
                    str(v.rated.topology),
                    f"{v.rated.goodput_rps:.2f}",
                    f"{100 * v.attainment:.1f}",
                    f"{v.figures['ttft_mean_ms']:.0f}",
                    f"{v.figures['ttft_p95_ms']:.0f}",
                    f"{v.figures['tpot_mean_ms']:.1f}",
                    f"{v.goodput_rps:.2f}",
                    f"{v.tokens_per_s_per_gpu:.1f}",
                ]
                for v in verified
            ],
        )
    best = rated[0]
    price = ", ".join(f"{g} {hardware(g).price_per_hour:.2f}" for g in counts)
    out.print(
        f"\n[bold]{best.topology}[/bold] ({best.topology.kind}): {best.goodput_rps:.2f} requests/s, "
        f"{best.outlook.bottleneck} binds. {answer.considered} topologies considered, "
        f"{len(answer.impossible)} layouts impossible. $ per GPU-hour: {price}",
        soft_wrap=True,
    )
    for name, why in list(answer.impossible.items())[:3]:
        err.print(f"[dim]left out {name}: {why}[/dim]", soft_wrap=True)


COLUMNS = ["topology", "GPUs", "req/s", "tok/s/GPU", "no queues", "req/$", "TTFT ms", "TPOT ms", "batch", "binds"]


def _row(entry: Rated) -> list[Any]:
    o = entry.outlook
    return [
        str(entry.topology),
        entry.gpus,
        f"{entry.goodput_rps:.2f}",
        f"{entry.tokens_per_s_per_gpu:.1f}",
        f"{entry.saturated_tokens_per_s_per_gpu:.1f}",
        f"{entry.requests_per_dollar:.0f}",
        f"{o.ttft_s * 1e3:.0f}",
        f"{o.tpot_s * 1e3:.1f}",
        f"{o.batch:.0f}",
        o.bottleneck,
    ]


def _entry(entry: Rated | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    o = entry.outlook
    return {
        "topology": str(entry.topology),
        "kind": entry.topology.kind,
        "gpus": entry.gpus,
        "goodput_rps": entry.goodput_rps,
        "goodput_per_gpu": entry.goodput_per_gpu,
        "tokens_per_s_per_gpu": entry.tokens_per_s_per_gpu,
        "saturated_tokens_per_s_per_gpu": entry.saturated_tokens_per_s_per_gpu,
        "requests_per_dollar": entry.requests_per_dollar,
        "ttft_ms": o.ttft_s * 1e3,
        "tpot_ms": o.tpot_s * 1e3,
        "itl_max_ms": o.itl_max_s * 1e3,
        "decode_batch": o.batch,
        "attainment": o.attainment,
        "limits": dict(o.limits),
        "bottleneck": o.bottleneck,
    }


def _verify(question: Question, rated: list[Rated], count: int) -> list[Verified]:
    if count == 0:
        return []
    if question.times == "aiconfigurator":
        raise UserError("verify: the simulator reads roofline or profile times; use --times roofline")
    from cluster.planner.verify import verify

    # One of each kind first: what a reader wants to know is whether the order of the two holds.
    chosen = rated[:count]
    split = next((e for e in rated if e.topology.kind == "split"), None)
    other = next((e for e in rated if e.topology.kind != "split" and len(e.topology.colocated) == 1), None)
    chosen += [e for e in (split, other) if e is not None and e not in chosen]
    chosen = [e for e in chosen if len(e.topology.colocated) <= 1]
    with err.status("simulating") as status:
        return [verify(question, entry, progress=status.update) for entry in chosen]


def _checked(v: Verified) -> dict[str, Any]:
    return {
        "topology": str(v.rated.topology),
        "analytic_goodput_rps": v.rated.goodput_rps,
        "attainment": v.attainment,
        "goodput_rps": v.goodput_rps,
        "tokens_per_s_per_gpu": v.tokens_per_s_per_gpu,
        "ttft_mean_ms": v.figures["ttft_mean_ms"],
        "ttft_p95_ms": v.figures["ttft_p95_ms"],
        "tpot_mean_ms": v.figures["tpot_mean_ms"],
    }


def _draw(
    rated: list[Rated],
    front: list[Rated],
    folder: Path,
    model: str,
    gpus: str,
    slo: Any,
    prompt: int,
    output: int,
    top: int,
) -> None:
    from cluster.planner.plots import image_tag, page, pareto_png, table_tag

    title = f"{model} on {gpus}: {prompt} in, {output} out, TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s * 1e3:g} ms"
    picture = pareto_png(rated, front, title)
    rows = [dict(zip(COLUMNS, _row(e), strict=True)) for e in rated]
    note = (
        "Goodput: the highest Poisson rate at which the wanted share of requests meets both limits. "
        "`no queues` is the rate at which means alone meet them."
    )
    text = page(
        title,
        note,
        [
            (
                "Pareto front",
                image_tag(picture, "Pareto front")
                + table_tag([dict(zip(COLUMNS, _row(e), strict=True)) for e in front]),
            ),
            (f"Best {min(top, len(rows))} of {len(rows)}", table_tag(rows[:top])),
        ],
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pareto.png").write_bytes(picture)
        (folder / "topology.html").write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"out: {folder} cannot be written ({e.strerror})") from None
    err.print(f"wrote {folder / 'pareto.png'} and {folder / 'topology.html'}")
