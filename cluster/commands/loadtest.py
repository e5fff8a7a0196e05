"""`pdserve loadtest SCENARIO --host URL`: put a scenario to an endpoint and write a report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.commands.output import command_line, err, out, print_json, styled

if TYPE_CHECKING:
    from loadtests.scenario import Scenario


def command(
    scenario: Annotated[str, typer.Argument(help="a scenario's name, or a YAML file; `list` shows the names")],
    host: Annotated[str, typer.Option(help="address of an OpenAI endpoint")] = "http://127.0.0.1:8000",
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="folder for the report; default: out/loadtest/SCENARIO")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="requests/s instead of the scenario's", min=0.001)] = None,
    speed: Annotated[float, typer.Option(help="multiply every rate by this", min=0.001)] = 1.0,
    duration: Annotated[float | None, typer.Option(help="seconds of arrivals instead of the scenario's", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="another workload of the same kind")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="try other rates; find the highest within the SLO")] = False,
    processes: Annotated[int, typer.Option(help="load generator processes", min=1, max=256)] = 1,
    model: Annotated[str | None, typer.Option(help="model name at the endpoint; default: its first")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="model folder, Hugging Face id on this disk, or `words`; default: the model's")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="bearer token", envvar="PDSERVE_API_KEY")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
) -> None:
    """Measure an endpoint with an open-loop workload: goodput, attainment, latencies from the scheduled time.

    Example: pdserve loadtest smoke --host http://127.0.0.1:8000 --out out/smoke
    """
    from cluster.folder import make_folder
    from loadtests import scenario as scenarios

    if scenario == "list":
        _list(as_json)
        return
    from loadtests.report.build import strict, write
    from loadtests.session import Session, Settings, check

    path = scenarios.find(scenario)
    chosen = _changed(scenarios.load(path), rate, speed, duration, seed)
    settings = Settings(host, model, tokenizer, processes, sweep, api_key, command=command_line(api_key))
    check(chosen, settings)
    folder = out_dir or Path("out") / "loadtest" / chosen.name
    make_folder(folder)
    session = Session(chosen, settings, lambda text: err.print(styled(("note:", "yellow"), f" {text}")))
    bars = _bars(chosen.workload.duration_s)
    result, run = session.measure(bars)
    files = write(result, run.samples, folder)
    if sweep:
        # What is measured is on disk before the other rates begin: they may take hours, and be interrupted.
        result["sweep"] = session.sweep(result, bars)
        files = write(result, run.samples, folder)
    if as_json:
        print_json(strict(result | {"files": [str(f) for f in files]}))
        return
    _show(result)
    err.print(f"report: {folder / 'report.html'}")
    print_json(strict(_key_figures(result)))


def _changed(
    scenario: Scenario, rate: float | None, speed: float, duration: float | None, seed: int | None
) -> Scenario:
    """The scenario with what the command line changes."""
    from cluster.errors import ConfigError

    workload = scenario.workload
    if rate is not None:
        own = _own_rate(scenario)
        if own is None:
            raise ConfigError("--rate", "this scenario has no rate of its own", "use --speed, or edit its YAML")
        speed *= rate / own
    if speed != 1.0:
        workload = workload.at_rate(speed)
    changes: dict[str, Any] = {}
    if duration is not None:
        changes["duration_s"] = duration
    if seed is not None:
        changes["seed"] = seed
    return scenario.model_copy(update={"workload": workload.model_copy(update=changes)})


def _own_rate(scenario: Scenario) -> float | None:
    rates = [getattr(s.arrivals, "rate_per_s", None) for s in scenario.workload.all_streams]
    return sum(rates) if all(r is not None for r in rates) else None  # type: ignore[arg-type]


def _list(as_json: bool) -> None:
    from rich.table import Table

    from loadtests import scenario as scenarios

    found = {name: scenarios.load(scenarios.find(name)) for name in scenarios.names()}
    if as_json:
        print_json({name: s.description for name, s in found.items()})
        return
    table = Table("scenario", "seconds", "what it is", box=None, pad_edge=False)
    for name, s in found.items():
        table.add_row(name, f"{s.workload.duration_s or 0:g}" if s.workload.duration_s else "trace", s.description)
    out.print(table)


def _bars(duration_s: float | None) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    @contextmanager
    def bar(name: str) -> Iterator[Any]:
        name_column = TextColumn("{task.description}", markup=False)
        columns = (name_column, BarColumn(), TextColumn("{task.fields[now]}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=not err.is_terminal) as progress:
            task = progress.add_task(name, total=duration_s, now="")

            def tell(at_s: float, sent: int, ended: int) -> None:
                now = f"{sent} sent, {sent - ended} in flight" if sent else ""
                progress.update(task, completed=min(at_s, duration_s or at_s), now=now)

            yield tell

    return bar


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table

    from loadtests.report.page import ms, percent, plain

    s, v, slo = result["summary"], result["validity"], result["slo"]
    table = Table("", "p50", "p90", "p99", "max", title=f"{result['scenario']['name']}: {result['model']}")
    rows = [("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("end to end", "e2e_s")]
    for name, key in rows:
        table.add_row(name, *(ms(s[key][q]) for q in ("p50", "p90", "p99", "max")))
    out.print(table)
    out.print(
        f"{s['offered']} offered, {s['good']} good, {s['done']} done, {s['rejected']} rejected, {s['failed']} failed, "
        f"{s['unfinished']} unfinished; attainment {percent(s['attainment'])} within TTFT {slo['ttft_ms']:g} ms and "
        f"TPOT {slo['tpot_ms']:g} ms"
    )
    out.print(
        f"goodput {plain(s['goodput_per_s'])}/s of {plain(v['planned_rate_per_s'])}/s offered ({v['loop']} loop), "
        f"{plain(s['output_tokens_per_s'])} output tokens/s, {percent(s['cached_share'])} of prompt tokens from cache"
    )
    for note in [*result["notes"], *(f"error: {e} ({n}x)" for e, n in s["errors"].items())]:
        out.print(note)
    if not v["valid"]:
        why = " the load generator was the bottleneck; " + "; ".join(v["reasons"])
        out.print(styled(("invalid run:", "bold red"), why))
    for goal, found in (result.get("sweep") or {}).get("highest_rate_per_s", {}).items():
        text = f"{found:.3g} requests/s" if found else "none of the rates tried"
        out.print(f"highest rate with attainment >= {100 * float(goal):g}%: {text}")


def _key_figures(result: dict[str, Any]) -> dict[str, Any]:
    s, v = result["summary"], result["validity"]
    figures = {
        "scenario": result["scenario"]["name"],
        "valid": v["valid"],
        "loop": v["loop"],
        "offered": s["offered"],
        "attainment": s["attainment"],
        "goodput_per_s": s["goodput_per_s"],
        "ttft_p50_s": s["ttft_s"]["p50"],
        "ttft_p99_s": s["ttft_s"]["p99"],
        "tpot_p50_s": s["tpot_s"]["p50"],
        "tpot_p99_s": s["tpot_s"]["p99"],
        "itl_p99_s": s["itl_s"]["p99"],
        "output_tokens_per_s": s["output_tokens_per_s"],
    }
    if result.get("sweep"):
        figures["highest_rate_per_s"] = result["sweep"]["highest_rate_per_s"]
    return figures
