"""The same question to this planner and to AIConfigurator's own search, side by side.

AIConfigurator answers for means, with fixed corrections (see docs/fidelity.md); this planner for the share of
requests within the limits under Poisson arrivals. Its rows come from its command's own result files.
"""

from __future__ import annotations

import csv
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.messages import Slo
from cluster.perf.aiconfigurator import MODELS, SYSTEMS, VERSION, interpreter
from cluster.perf.hardware import hardware
from cluster.perf.model_shape import model_shape
from cluster.planner.rates import Workload
from cluster.planner.topology import Planner, Question, Rated


def answers(
    model: str, gpu: str, count: int, prompt: int, output: int, ttft_ms: float, tpot_ms: float
) -> list[dict[str, Any]]:
    """Best split and best colocated of: this planner on its roofline, on AIConfigurator's tables, AIConfigurator.

    Raises:
        UserError: AIConfigurator is not installed, or knows nothing of the model or GPU.
    """
    name = f"{model} on {count} {gpu}"
    rows = []
    for times in ("roofline", "aiconfigurator"):
        question = Question(
            model_shape(model),
            {hardware(gpu).name: count},
            Workload(prompt, output),
            Slo(ttft_ms / 1e3, tpot_ms / 1e3),
            times=times,
        )
        answer = Planner(question).search()
        whole = next((e for e in answer.rated if e.topology.kind == "colocated"), None)
        for kind, entry in (
            ("split", answer.best("split")),
            ("colocated", whole),
            ("chunked", answer.best("colocated")),
        ):
            if entry is not None and (kind != "chunked" or entry is not whole):
                rows.append(_ours(name, f"pdserve, {times}", kind, entry))
    for chunked in (False, True):
        rows += _theirs(name, model, gpu, count, prompt, output, ttft_ms, tpot_ms, chunked=chunked)
    return rows


def _ours(name: str, who: str, kind: str, entry: Rated) -> dict[str, Any]:
    return {
        "model and GPUs": name,
        "who": who,
        "kind": kind,
        "best layout": str(entry.topology),
        "tok/s/GPU": round(entry.tokens_per_s_per_gpu, 1),
        "no queues tok/s/GPU": round(entry.saturated_tokens_per_s_per_gpu, 1),
        "req/s": round(entry.goodput_rps, 2),
        "TTFT ms": round(entry.outlook.ttft_s * 1e3),
        "TPOT ms": round(entry.outlook.tpot_s * 1e3, 1),
    }


def _theirs(
    name: str,
    model: str,
    gpu: str,
    count: int,
    prompt: int,
    output: int,
    ttft_ms: float,
    tpot_ms: float,
    *,
    chunked: bool,
) -> list[dict[str, Any]]:
    system, path = SYSTEMS.get(hardware(gpu).name), MODELS.get(model_shape(model).name)
    if system is None or path is None:
        raise UserError(f"compare: AIConfigurator has no tables for {model} on {gpu}")
    program = Path(interpreter()).with_name("aiconfigurator")
    if not program.exists():
        raise UserError("compare: AIConfigurator's command is not installed; run `make aiconfigurator`")
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "--model-path": path,
            "--system": system,
            "--total-gpus": count,
            "--backend": "vllm",
            "--isl": prompt,
            "--osl": output,
            "--ttft": ttft_ms,
            "--tpot": tpot_ms,
            "--save-dir": folder,
        }
        command = [str(program), "cli", "default", *(str(x) for pair in arguments.items() for x in pair)]
        command += ["--enable-chunked-prefill"] if chunked else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        files = sorted(Path(folder).rglob("best_config_topn.csv"))
        if done.returncode or not files:
            last = (done.stderr.strip().splitlines() or ["no result"])[-1]
            raise UserError(f"compare: AIConfigurator failed: {last[:200]}")
        rows = []
        for file in files:
            kind = "split" if file.parent.name == "disagg" else "chunked" if chunked else "colocated"
            if chunked and kind == "split":
                continue
            with file.open(encoding="utf-8", newline="") as stream:
                best = next(csv.DictReader(stream), None)
            if best is not None:
                rows.append(_their_row(name, kind, best, count))
        return rows


def _their_row(name: str, kind: str, best: dict[str, str], count: int) -> dict[str, Any]:
    units = count // int(float(best["num_total_gpus"]))
    if kind == "split":
        layout = (
            f"P {units * int(float(best['(p)workers']))} x tp{best['(p)tp']} + "
            f"D {units * int(float(best['(d)workers']))} x tp{best['(d)tp']}"
        )
    else:
        layout = f"{units} x tp{best['tp']}"
    per_gpu = float(best["tokens/s/gpu"])
    return {
        "model and GPUs": name,
        "who": f"AIConfigurator {VERSION}",
        "kind": kind,
        "best layout": layout,
        "tok/s/GPU": round(per_gpu, 1),
        "no queues tok/s/GPU": None,
        "req/s": round(per_gpu * count / float(best["osl"]), 2),
        "TTFT ms": round(float(best["ttft"])),
        "TPOT ms": round(float(best["tpot"]), 1),
    }


def main() -> None:
    """`make plan-compare`: the table of docs/fidelity.md, then one line of JSON with the key ratios."""
    import argparse
    import json
    import sys

    parser = argparse.ArgumentParser(prog="python -m cluster.planner.compare", description=main.__doc__)
    parser.add_argument("--gpus", nargs="+", default=["H100", "H200"], choices=sorted(SYSTEMS))
    parser.add_argument("--models", nargs="+", default=["llama-3.1-70b", "llama-3.1-8b", "qwen3-32b"])
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in asked.models:
        for gpu in asked.gpus:
            print(f"{model} on 16 {gpu}", file=sys.stderr)
            rows += answers(model, gpu, 16, 4000, 500, 2000.0, 40.0)
    columns = ["model and GPUs", "who", "kind", "best layout", "tok/s/GPU", "req/s", "TTFT ms", "TPOT ms"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row[c]) for c in columns) + " |")
    print(json.dumps(agreement(rows)))


def agreement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How the two searches agree: same winner (split or not), same best split layout, ratio of goodputs."""
    cases = list(dict.fromkeys(row["model and GPUs"] for row in rows))
    winners = layouts = 0
    ratios: list[float] = []
    for case in cases:
        ours = {r["kind"]: r for r in rows if r["model and GPUs"] == case and r["who"] == "pdserve, aiconfigurator"}
        theirs = {r["kind"]: r for r in rows if r["model and GPUs"] == case and r["who"].startswith("AIConf")}

        def split_wins(answer: dict[str, dict[str, Any]]) -> bool:
            rest = [r["tok/s/GPU"] for kind, r in answer.items() if kind != "split"]
            return bool(answer["split"]["tok/s/GPU"] > max(rest))

        winners += split_wins(ours) == split_wins(theirs)
        bare = ours["split"]["best layout"]
        for gpu in SYSTEMS:
            bare = bare.replace(f"{gpu} ", "")
        layouts += bare == theirs["split"]["best layout"]
        ratios += [ours[k]["tok/s/GPU"] / theirs[k]["tok/s/GPU"] for k in ours.keys() & theirs.keys()]
    return {
        "cases": len(cases),
        "same_winner": winners,
        "same_split_layout": layouts,
        "goodput_ratio_min": round(min(ratios), 3),
        "goodput_ratio_max": round(max(ratios), 3),
    }


if __name__ == "__main__":
    main()
