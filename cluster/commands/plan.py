"""`pdserve plan`: what fits, what speculation gains, which topology to buy. Answers come from formulas, in seconds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cluster.commands.output import out, print_json, styled
from cluster.commands.plan_options import (
    Gpu,
    Json,
    Kv,
    Model,
    Pp,
    ProfileFile,
    Times,
    Tp,
    Weights,
    milliseconds,
    model_and_gpu,
    print_table,
)
from cluster.commands.plan_topology import compare, topology
from cluster.errors import UserError

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Capacity, speculation and topology.")
app.command()(topology)
app.command()(compare)


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
    shape, device = model_and_gpu(model, gpu)
    limits = EngineLimits(utilization, block_tokens, max_batched_tokens, max_num_seqs)
    budget = memory_budget(shape, device, tp, pp, weights, limits)
    tpot_s = milliseconds("tpot-ms", tpot_ms)
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
    print_table(
        f"{shape.name} on {tp * pp} x {device.name} (tp {tp}, pp {pp}): one GPU's memory",
        ["part", "GiB", "share %"],
        [[name, size / GIB, 100 * size / memory] for name, size in parts.items()] + [["total", memory / GIB, 100.0]],
    )
    print_table(
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
        styled(
            f"\nKV {result.kv_bytes_per_token:,} bytes a token and GPU, {result.pool_blocks:,} blocks = "
            f"{result.pool_tokens:,} tokens\n",
            (f"{result.concurrency} sequences; {result.binding} binds", "bold"),
        )
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
    shape, device = model_and_gpu(model, gpu)
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
    print_table(
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
        best, why = (f"k = {k}", f", {gain:.2f} x") if k else ("off", ": every k loses")
        out.print(styled(f"batch {batch}: ", (best, "bold"), why))
