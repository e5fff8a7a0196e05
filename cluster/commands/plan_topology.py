"""`pdserve plan topology` and `pdserve plan compare`: a search, and the same question put to AIConfigurator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.commands.output import err, out, print_json, styled
from cluster.commands.plan_options import Json, Kv, Model, ProfileFile, Times, Weights, milliseconds, print_table
from cluster.errors import UserError

if TYPE_CHECKING:
    from cluster.planner.topology import Question, Rated
    from cluster.planner.verify import Verified


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
    slo = Slo(milliseconds("ttft-ms", ttft_ms) or 0.0, milliseconds("tpot-ms", tpot_ms) or 0.0)
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
        itl_max_s=milliseconds("itl-max-ms", itl_max_ms),
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
    print_table(title, COLUMNS, [_row(e) for e in rated[:top]])
    others = [e for e in (answer.best("split"), answer.best("colocated")) if e and e not in rated[:top]]
    if others:
        print_table("\nBest of the other kind", COLUMNS, [_row(e) for e in others])
    print_table("\nPareto front: speed of one user against goodput", COLUMNS, [_row(e) for e in front[:top]])
    if verified:
        print_table(
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
        styled(
            "\n",
            (str(best.topology), "bold"),
            f" ({best.topology.kind}): {best.goodput_rps:.2f} requests/s, {best.outlook.bottleneck} binds. "
            f"{answer.considered} topologies considered, {len(answer.impossible)} layouts impossible. "
            f"$ per GPU-hour: {price}",
        ),
        soft_wrap=True,
    )
    for name, why in list(answer.impossible.items())[:3]:
        err.print(f"left out {name}: {why}", style="dim", soft_wrap=True)


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


def compare(
    models: Annotated[str, typer.Option(help="known shapes, comma-separated")] = "llama-3.1-70b,llama-3.1-8b,qwen3-32b",
    gpus: Annotated[str, typer.Option(help="types to ask about, comma-separated")] = "H100,H200",
    count: Annotated[int, typer.Option(min=1, help="GPUs of each type")] = 16,
    prompt: Annotated[int, typer.Option(min=1)] = 4000,
    output: Annotated[int, typer.Option(min=2)] = 500,
    ttft_ms: Annotated[float, typer.Option()] = 2000,
    tpot_ms: Annotated[float, typer.Option()] = 40,
    json: Json = False,
) -> None:
    """Put the same question to this planner and to AIConfigurator (`make aiconfigurator` installs it).

    Example: [bold]pdserve plan compare --models qwen3-32b --gpus H200[/bold]
    """
    from cluster.planner.compare import answers

    rows = []
    with err.status("comparing") as status:
        for model in models.split(","):
            for gpu in gpus.split(","):
                status.update(f"{model} on {count} {gpu}")
                question = (model.strip(), gpu.strip(), count, prompt, output, ttft_ms, tpot_ms)
                rows += answers(*question)
    if json:
        print_json({"rows": rows})
        return
    columns = ["model and GPUs", "who", "kind", "best layout", "tok/s/GPU", "req/s", "TTFT ms", "TPOT ms"]
    print_table(
        f"{prompt} tokens in, {output} out, TTFT {ttft_ms:g} ms, TPOT {tpot_ms:g} ms",
        columns,
        [[row[c] for c in columns] for row in rows],
    )


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
