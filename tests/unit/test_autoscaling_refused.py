"""A config that the policy would refuse is refused where it is written: Serve's controller would only log it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.autoscaling.serve_policy import application_policy, deployment_autoscaling
from cluster.cli import main
from cluster.config import parse
from cluster.errors import ConfigError
from cluster.kubernetes.groups import groups
from cluster.messages import Role
from cluster.preflight import preflight

GPU = Path(__file__).resolve().parents[2] / "k8s" / "overlays" / "gpu" / "config.yaml"
SHORT = {"policy": "goodput", "downscale_delay_s": 30}
LINE = "autoscaling.downscale_delay_s: 30 is below look_back_s 60: pools would flap; use at least 60"


def on_pods(autoscaling: dict[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(GPU.read_text())
    return raw | {"autoscaling": autoscaling}


@pytest.mark.parametrize("kind", ["vllm", "simulated"])
def test_preflight_asks_the_policy_and_so_check_and_serve_do(kind: str) -> None:
    raw: dict[str, Any] = {"engine": {"kind": kind}}
    with pytest.raises(ConfigError) as refused:
        preflight(parse({**raw, "autoscaling": SHORT}))
    assert str(refused.value) == LINE
    preflight(parse({**raw, "autoscaling": SHORT | {"policy": "off"}}))
    preflight(parse({**raw, "autoscaling": SHORT | {"look_back_s": 30}}))


@pytest.mark.parametrize("command", [["check"], ["k8s", "render"], ["k8s", "render", "--serve"]])
def test_commands_answer_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(on_pods(SHORT)))
    with pytest.raises(SystemExit) as ended:
        main([*command, str(path)])
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert captured.out == ""
    assert " ".join(captured.err.split()).endswith(LINE)
    assert "Traceback" not in captured.err


def test_nothing_is_made_for_serve_either() -> None:
    config = parse(on_pods(SHORT))
    for make in (groups, application_policy, lambda c: deployment_autoscaling(c, Role.DECODE)):
        with pytest.raises(ConfigError, match="below look_back_s"):
            make(config)
    off = parse(on_pods(SHORT | {"policy": "off"}))
    assert application_policy(off) is None
    assert set(groups(off)) == {"router", "prefill", "decode"}
