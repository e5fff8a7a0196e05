"""`pdserve experiment --live` on Ray with simulated engines, beside the simulator's answer to the same file."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.live, pytest.mark.slow]

FILE = Path(__file__).parents[2] / "loadtests/experiments/live-check.yaml"


def test_one_file_live_and_simulated(tmp_path: Path) -> None:
    """Two rates on one cluster: what the first left in the caches must not help the second."""
    spec: dict[str, Any] = yaml.safe_load(FILE.read_text())
    spec["axes"]["split"].pop("2 colocated")
    spec["workload"]["duration_s"] = 12
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(spec))
    rows = {}
    for name, flags in (("simulated", []), ("live", ["--live"])):
        folder = tmp_path / name
        command = [sys.executable, "-m", "cluster.cli", "experiment", str(file), "--out", str(folder), "--json", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout)["runs"] == 2
        assert (folder / "report.html").stat().st_size > 10_000
        with (folder / "runs.csv").open() as f:
            rows[name] = list(csv.DictReader(f))
    for live, simulated in zip(rows["live"], rows["simulated"], strict=True):
        assert live["offered"] == simulated["offered"] == live["done"]
        assert float(live["cached_share"]) == float(simulated["cached_share"]) == 0
        assert live["transfers"] == simulated["transfers"]
        assert float(live["transferred_gb"]) == pytest.approx(float(simulated["transferred_gb"]), rel=0.01)
