"""`pdserve diagnose SOURCE`: which symptoms are present, the numbers that show them, the lever and its cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.commands.output import out, print_json, styled

if TYPE_CHECKING:
    from cluster.diagnosis.rules import Finding
    from loadtests.sources import Source


def command(
    source: Annotated[
        str, typer.Argument(help="http://host:port of a cluster, or the folder of a load test or experiment")
    ] = "http://127.0.0.1:8000",
    prompts: Annotated[
        Path | None, typer.Option(help="instead of SOURCE: a log of prompts (JSON lines); checks their order")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="with --prompts: model folder, `embedded` or `words`")] = None,
    all_rules: Annotated[bool, typer.Option("--all", help="also what is absent or could not be decided")] = False,
    api_key: Annotated[str | None, typer.Option(help="bearer token", envvar="PDSERVE_API_KEY")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False,
) -> None:
    """Say what limits a cluster, from measurements, and what would change it.

    Example: pdserve diagnose out/loadtest/chat
    """
    from cluster.diagnosis.rules import as_json as finding_json
    from cluster.diagnosis.rules import examine
    from loadtests.sources import read, read_prompts

    if prompts is None and ":" in source and not Path(source).exists():
        _require_cluster(source, api_key)
    sources = read(source, api_key) if prompts is None else [read_prompts(prompts, tokenizer)]
    found = [(s, examine(s.evidence)) for s in sources]
    if as_json:
        runs = [
            {"name": s.name, "note": s.note, "findings": [finding_json(f) for f in fs], "evidence": s.evidence}
            for s, fs in found
        ]
        print_json({"source": source if prompts is None else str(prompts), "runs": runs})
        return
    for s, findings in found:
        _show(s, findings, all_rules)


def _require_cluster(source: str, api_key: str | None) -> None:
    """Raise UserError where no router answers: there would be nothing to find, which is not the same as health."""
    from cluster.runtime.local import fetch_status
    from loadtests.endpoint import base_url, header_text

    if api_key:
        header_text("--api-key", api_key, charset="ascii")
    fetch_status(base_url(source), api_key)


def _show(source: Source, findings: list[Finding], all_rules: bool) -> None:
    present = [f for f in findings if f.verdict == "present"]
    out.print(styled((source.name, "bold"), f": {source.evidence.get('requests', 0):.0f} requests"))
    if source.note:
        out.print(styled(("note:", "yellow"), f" {source.note}"))
    if not present:
        out.print("no symptom is present in these numbers")
    for f in present:
        r = f.rule
        out.print(styled("\n", (r.id, "bold red"), f" {r.symptom}"))
        out.print(f"  because    {r.cause}")
        out.print(f"  where      {r.stage}; short of: {r.resource}")
        out.print(f"  shown by   {_numbers(f.numbers)}")
        out.print(f"  lever      {r.lever}")
        out.print(f"  cost       {r.cost}")
        out.print(f"  confirm    {r.confirm}")
        out.print(f"  refute     {r.refute}")
    undecided = [f for f in findings if f.verdict == "undecided"]
    if undecided and not all_rules:
        names = ", ".join(f.rule.id for f in undecided)
        out.print(f"\nnot decided for want of numbers: {names} (--all says which)", style="dim")
    if all_rules:
        _table(findings)


def _table(findings: list[Finding]) -> None:
    from rich.table import Table

    table = Table("rule", "verdict", "why")
    for f in findings:
        why = f"{f.failed} does not hold" if f.failed else f"needs {', '.join(f.missing)}" if f.missing else "all hold"
        table.add_row(f.rule.id, f.verdict, f"{why}: {_numbers(f.numbers)}" if f.numbers else why)
    out.print(table)


def _numbers(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
