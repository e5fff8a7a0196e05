"""`pdserve simulate`: a cluster's YAML and a workload, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.commands.output import err, out, print_json

if TYPE_CHECKING:
    from cluster.config import ClusterConfig
    from cluster.workload.spec import Workload


def command(
    config_path: Annotated[str, typer.Argument(metavar="CONFIG", help="a cluster's YAML")],
    workload: Annotated[
        str,
        typer.Option(
            "--workload", "-w", metavar="W", help="a scenario by name, a scenario or workload YAML, or a trace file"
        ),
    ],
    seed: Annotated[int, typer.Option(min=0, help="0 = the workload's own")] = 0,
    rate: Annotated[float, typer.Option(min=1e-6, max=1e6, help="multiply the arrival rate")] = 1.0,
    timeline: Annotated[Path | None, typer.Option(help="write a Chrome trace (Perfetto opens it) to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
) -> None:
    """Play a workload against a simulated cluster: the live router's policies around simulated engines.

    Example: pdserve simulate cluster.yaml --workload chat --json
    """
    from cluster.config import load
    from cluster.sim.fleet import Options
    from cluster.sim.run import simulate
    from cluster.sim.trace import write_chrome_trace

    config = load(config_path)
    if not config.engine.simulated and not any(p and p.simulated for p in (config.pools.prefill, config.pools.decode)):
        err.print("engine.simulated is empty: steps take what the linear default says, a 7B-class model on one GPU")
    what = _workload(workload)
    if what.slo is not None and "slo" not in config.model_fields_set:
        config = config.model_copy(update={"slo": what.slo})
    if rate != 1.0:
        what = what.at_rate(rate)
    options = Options(seed=seed, timeline=timeline is not None)
    with err.status("simulating") as status:
        result = simulate(
            config,
            what,
            options,
            progress=lambda ended, now: status.update(f"simulating: {ended} requests ended, {now:.0f} s"),
        )
    if timeline is not None:
        try:
            write_chrome_trace(result.fleet, timeline)
        except OSError as e:
            from cluster.errors import UserError

            raise UserError(f"--timeline: {timeline} cannot be written ({e.strerror})") from e
        err.print(f"timeline: {timeline}")
    summary = result.summary()
    if as_json:
        print_json(summary)
    else:
        _show(summary, config)


def _workload(name: str) -> Workload:
    from cluster.workload import spec
    from loadtests import scenario

    path = Path(name)
    if path.suffixes[-1:] in ([".gz"], [".jsonl"], [".csv"]):
        return spec.parse({"name": path.name, "trace": {"path": str(path.resolve())}})
    found = scenario.find(name)
    try:
        text = found.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        from cluster.errors import ConfigError

        raise ConfigError(str(found), "is not UTF-8 text", "give a YAML file or a trace") from e
    if any(line.startswith("workload:") for line in text.splitlines()):
        return scenario.load(found).workload
    return spec.load(found)


def _show(summary: dict[str, Any], config: ClusterConfig) -> None:
    from rich.table import Table

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{1e3 * value:.1f}"

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}%"

    table = Table("latency, ms", "mean", "p50", "p90", "p95", "p99", title=f"{config.name}: simulated")
    for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("itl_s", "ITL")):
        row = summary[name]
        table.add_row(label, *(ms(row[column]) for column in ("mean", "p50", "p90", "p95", "p99")))
    out.print(table)
    pools = Table("pool", "engines", "tp x pp", "busy", "mean batch", "cached", "pulled", "preempted")
    for name, pool in summary["pools"].items():
        prompt = pool["computed_prompt_tokens"] + pool["cached_prompt_tokens"] + pool["pulled_prompt_tokens"]
        pools.add_row(
            name,
            str(pool["engines"]),
            f"{pool['tp']} x {pool['pp']}",
            share(pool["busy"]),
            f"{pool['mean_batch']:.1f}",
            share(pool["cached_prompt_tokens"] / prompt if prompt else None),
            share(pool["pulled_prompt_tokens"] / prompt if prompt else None),
            str(pool["preemptions"]),
        )
    out.print(pools)
    missed = {stage: n for stage, n in summary["missed_by_stage"].items() if n}
    each = summary.get("goodput_per_s_per_accelerator")
    out.print(
        f"offered {summary['offered']}, done {summary['done']}, failed {summary['failed']}, "
        f"rejected {summary['rejected']}; attainment {share(summary['attainment'])}; "
        f"goodput {summary['goodput_per_s']:.3g}/s, "
        + ("" if each is None else f"{each:.3g}/s per accelerator; ")
        + f"{summary['output_tokens_per_s']:.0f} tokens/s"
    )
    if missed:
        out.print("missed by stage: " + ", ".join(f"{stage} {n}" for stage, n in missed.items()))
    out.print("paths: " + ", ".join(f"{path} {n}" for path, n in summary["paths"].items()))
    out.print(f"{summary['duration_s']:.0f} s of service in {summary['wall_s']:.1f} s, {summary['events']} events")
