"""`pdserve experiment`: everything that one file asks, run in the simulator, as tables, plots and one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.commands.output import command_line, err, print_json


def command(
    file: Annotated[Path, typer.Argument(help="an experiment, e.g. loadtests/experiments/pd-ratio.yaml")],
    out: Annotated[Path | None, typer.Option(help="folder for the report; default out/experiments/NAME")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="start each combination on Ray and load it over HTTP, in real time")
    ] = False,
    seeds: Annotated[str | None, typer.Option(help="instead of the file's, e.g. 1,2,3")] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Run every combination of an experiment's axes, rates and seeds, and write results.json, CSV, plots, report.html.

    Example: [bold]pdserve experiment loadtests/experiments/pd-ratio.yaml --out out/pd-ratio[/bold]
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from cluster.errors import UserError
    from cluster.folder import make_folder
    from cluster.planner import experiment, report

    spec = experiment.load(file)
    if seeds is not None:
        if not all(s.strip().isdecimal() for s in seeds.split(",")):
            raise UserError(f"seeds: {seeds!r} is not a list of whole numbers; e.g. 1,2,3")
        spec = spec.model_copy(update={"seeds": tuple(int(s) for s in seeds.split(","))})
    folder = out or Path("out/experiments") / file.stem
    make_folder(folder)
    # Titles and labels are the user's words: brackets in them are no markup.
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(spec.title, total=experiment.count(spec))
        started = False

        def progress(label: str) -> None:
            nonlocal started
            bar.update(task, advance=1 if started else 0, description=label[:60])
            started = True

        if live:
            from cluster.commands.experiment_live import served

            result = experiment.run(spec, progress, served)
        else:
            result = experiment.run(spec, progress)
    files = report.write(result, folder, command_line(None))
    rows = experiment.averaged(result.cases)
    target = report.attainment_target(result)
    reached = report.highest_rate_at(rows, target) if spec.rates else {}
    best = report.best_rows(rows)
    missing = experiment.left_out(result.cases)
    if json:
        print_json(
            {
                "title": spec.title,
                "out": str(folder),
                "files": [p.name for p in files],
                "runs": len(result.cases),
                "attainment_target": target,
                "rate_at_attainment": reached,
                "best": [{"label": r["label"], "rate": r["rate_rps"], "goodput_rps": r["goodput_rps"]} for r in best],
                "left_out": missing,
            }
        )
        return
    print(spec.title)
    width = max(len(r["label"]) for r in best)
    head = f"rate at {target:.0%}" if reached else "rate/s"
    print(f"  {'variant':{width}s}  {head:>12s}  goodput/s   per GPU   TTFT p95 ms   TPOT p99 ms   ITL max ms")
    for row in sorted(best, key=lambda r: -reached.get(r["label"], r["goodput_rps"])):
        print(
            f"  {row['label']:{width}s}  {reached.get(row['label'], row['rate_rps']):12.2f}  {row['goodput_rps']:9.2f}"
            f"  {row['goodput_per_gpu']:8.3f}  {row['ttft_p95_ms'] or 0:12.0f}  {row['tpot_p99_ms'] or 0:12.1f}"
            f"  {row['itl_max_ms'] or 0:11.1f}"
        )
    for row in missing:
        print(f"left out {row['variant']} ({row['runs']}): {row['reason']}")
    print(f"wrote {folder / 'report.html'} and {len(files) - 1} files beside it")
