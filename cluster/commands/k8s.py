"""`pdserve k8s`: from a ClusterConfig to manifests, and a check of the manifests that kustomize builds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.commands.output import err, print_json, styled
from cluster.errors import UserError

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Kubernetes manifests for KubeRay.")

RENDERED = "kustomization.yaml"


@app.command()
def render(
    config: Annotated[Path, typer.Argument(help="a ClusterConfig")],
    out: Annotated[Path | None, typer.Option(help="folder to write the kustomize Component to")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="only the Serve config, for `serve deploy`")] = False,
    compare: Annotated[bool, typer.Option("--check", help="write nothing; fail if --out holds something else")] = False,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Write what a config decides: sizes, resources, timers, and the Serve config.

    Example: [bold]pdserve k8s render k8s/overlays/gpu/config.yaml --out k8s/overlays/gpu/rendered[/bold]
    """
    from cluster.config import load
    from cluster.kubernetes.groups import groups
    from cluster.kubernetes.render import component
    from cluster.kubernetes.serve_config import serve_config_text

    cluster = load(config)
    groups(cluster)  # what a Serve config alone does not need and its cluster does
    text = serve_config_text(cluster) if serve else component(cluster, config.name)
    if out is None:
        if compare:
            raise UserError("--check: needs --out, the folder to compare with")
        if json:
            print_json({"text": text})
        else:
            print(text, end="")
        return
    target = out / ("serve-config.yaml" if serve else RENDERED)
    if compare:
        present = target.read_bytes() if target.is_file() else None
        if present != text.encode():
            raise UserError(f"{target}: is not what {config} renders to; run the same command without --check")
        _say(f"{target} is up to date", {"up_to_date": str(target)}, json)
        return
    _write(target, text, folder=out)
    _say(f"wrote {target}", {"wrote": str(target)}, json)


@app.command()
def environment(
    config: Annotated[Path, typer.Argument(help="a ClusterConfig")],
    json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Print what every machine must set before `ray start`, as lines for a shell. Manifests hold the same.

    Example: [bold]eval "$(pdserve k8s environment cluster.yaml)"[/bold]
    """
    import shlex

    from cluster.config import load
    from cluster.kubernetes.groups import environment as variables
    from cluster.kubernetes.groups import groups

    cluster = load(config)
    groups(cluster)
    found = variables(cluster)
    if json:
        print_json(found)
        return
    for name, value in found.items():
        print(f"export {name}={shlex.quote(value)}")


@app.command()
def check(
    sources: Annotated[
        list[Path], typer.Argument(help="kustomize folders or YAML files, checked together; - is stdin")
    ],
    json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Find in built manifests what a server accepts and KubeRay, a kubelet or a client then rejects.

    Example: [bold]pdserve k8s check k8s/overlays/gpu k8s/overlays/monitoring[/bold]
    """
    from cluster.kubernetes.check import check as find_mistakes
    from cluster.kubernetes.manifests import load

    manifests = [manifest for source in sources for manifest in load(_text(source), str(source))]
    findings = find_mistakes(manifests)
    if json:
        print_json(
            {"objects": len(manifests), "findings": [{"where": f.where, "problem": f.problem} for f in findings]}
        )
    else:
        for finding in findings:
            err.print(styled(("x", "red"), f" {finding.where}: {finding.problem}"), soft_wrap=True)
        err.print(f"{len(manifests)} objects, {len(findings)} mistakes")
    if findings:
        raise typer.Exit(2)


@app.command()
def dashboard(
    out: Annotated[Path | None, typer.Option(help="file to write")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout; without --out it is one")] = False,
) -> None:
    """Write the Grafana dashboard (JSON).

    Example: [bold]pdserve k8s dashboard --out k8s/overlays/monitoring/dashboard.json[/bold]
    """
    import json

    from cluster.kubernetes.dashboard import dashboard as make

    text = json.dumps(make(), indent=1) + "\n"
    if out is None:
        print(text, end="")
    else:
        _write(out, text)
        _say(f"wrote {out}", {"wrote": str(out)}, as_json)


def _say(line: str, figures: dict[str, str], as_json: bool) -> None:
    if as_json:
        print_json(figures)
    else:
        err.print(line)


def _write(path: Path, text: str, folder: Path | None = None) -> None:
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UserError(f"--out: {path} cannot be written ({e.strerror}); choose another place") from None


def _text(source: Path) -> str:
    try:
        if str(source) == "-":
            return sys.stdin.read()
        if source.is_file():
            return source.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{source}: cannot be read ({e.strerror}); give a folder or a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"{source}: is not UTF-8 text; give a folder or a YAML file") from None
    if not source.is_dir():
        raise UserError(f"{source}: is no file and no folder")
    try:
        built = subprocess.run(["kubectl", "kustomize", str(source)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(
            "kubectl: is not installed; build with kustomize and pipe it to `pdserve k8s check -`"
        ) from None
    if built.returncode != 0:
        raise UserError(f"{source}: kustomize cannot build it: {built.stderr.strip()}")
    return built.stdout
