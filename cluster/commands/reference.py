"""`pdserve reference`: the published figures of the field beside what this code computes, with a verdict on each."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from cluster.commands.output import err, out, print_json, styled


def command(
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
) -> None:
    """Compare formulas and scheduler with published figures.

    Example: pdserve reference --json
    """
    from cluster.planner.reference import exact_figures
    from cluster.sim import shapes

    caps: list[int] = shapes.published()["batch_caps"]["workload"]["caps"]
    with err.status("running the reference traces"):
        figures = exact_figures()
        policies = shapes.policies()
        sweep, tighter = shapes.batch_caps(caps), shapes.batch_caps(caps, 0.008)
    own_answer = int(next(f.ours for f in figures if f.path == "slo_batch_cap.value"))
    bands = shapes.policy_bands(policies) + shapes.batch_cap_bands(caps, sweep, tighter, own_answer)
    result: dict[str, Any] = {
        "exact_total": len(figures),
        "exact_ok": sum(f.ok for f in figures),
        "bands_total": len(bands),
        "bands_ok": sum(b.ok for b in bands),
    }
    if not as_json:
        _show(figures, policies, caps, sweep, bands)
        print_json(result)
        return
    trace = {name: getattr(shapes.TRACE, name) for name in shapes.TRACE.__slots__}
    result["exact"] = [{"figure": f.path, "published": f.value, "ours": f.ours, "ok": f.ok} for f in figures]
    result["policies"], result["batch_caps"] = policies, dict(zip(caps, sweep, strict=True))
    result["bands"] = [{"statement": b.statement, "measured": b.measured, "ok": b.ok} for b in bands]
    result["trace"] = trace
    print_json(result)


def _show(
    figures: list[Any],
    policies: dict[str, dict[str, float]],
    caps: list[int],
    sweep: list[dict[str, float]],
    bands: list[Any],
) -> None:
    from rich.table import Table

    from cluster.sim import shapes

    exact = Table("figure with a formula", "published", "ours", "verdict", title="Exact: within 0.5%, or rounds to it")
    for f in figures:
        exact.add_row(f.path, f.expected, f"{f.ours:.5g}", _verdict(f.ok))
    out.print(exact)
    published = shapes.published()
    table = Table("policy: published | ours", *policies, title="Three policies, 12 requests/s, batch 32")
    for column in next(iter(policies.values())):
        row = (f"{published['policies']['reference'][p][column]:g} | {policies[p][column]:.5g}" for p in policies)
        table.add_row(column, *row)
    out.print(table)
    cap_table = Table("cap: published | ours", *(str(c) for c in caps), title="Batch cap, 20 requests/s, TPOT 12 ms")
    for column, values in published["batch_caps"]["reference"].items():
        cap_table.add_row(column, *(f"{v:g} | {row[column]:.5g}" for v, row in zip(values, sweep, strict=True)))
    out.print(cap_table)
    band_table = Table("band that must hold", "measured", "verdict", title="Bands")
    for b in bands:
        band_table.add_row(b.statement, b.measured, _verdict(b.ok))
    out.print(band_table)
    t = shapes.TRACE
    out.print(
        f"trace: {t.requests} requests, seed {t.seed}; prompts lognormal, median {t.prompt_median_tokens:g}, sigma "
        f"{t.prompt_sigma:g}, at most {t.prompt_max_tokens}; outputs lognormal, mean {t.output_mean_tokens:g}, sigma "
        f"{t.output_sigma:g}, at most {t.output_max_tokens}; the published trace is not known, so the tables agree "
        "in shape, not in digits"
    )


def _verdict(ok: bool) -> Text:
    return styled(("ok", "green") if ok else ("differs", "red"))
