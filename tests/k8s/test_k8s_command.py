"""`pdserve k8s`: what a person at the command line sees."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml

from cluster.cli import main

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "k8s" / "overlays" / "gpu" / "config.yaml"


def run(capsys, *arguments, code=0):
    try:
        main(["k8s", *map(str, arguments)])
        found = 0
    except SystemExit as end:
        found = end.code or 0
    seen = capsys.readouterr()
    assert found == code, seen.err
    return seen.out, seen.err


def test_render_prints_the_component(capsys):
    out, _ = run(capsys, "render", CONFIG)
    assert yaml.safe_load(out)["kind"] == "Component"


def test_render_serve_prints_what_serve_deploy_reads(capsys):
    out, _ = run(capsys, "render", CONFIG, "--serve")
    assert yaml.safe_load(out)["applications"][0]["import_path"] == "cluster.app:build"


def test_render_check_tells_a_stale_folder(capsys, tmp_path):
    run(capsys, "render", CONFIG, "--out", tmp_path)
    run(capsys, "render", CONFIG, "--out", tmp_path, "--check")
    other = tmp_path / "config.yaml"
    other.write_text(CONFIG.read_text().replace("max: 4", "max: 5"))
    out, err = run(capsys, "render", other, "--out", tmp_path, "--check", code=2)
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "run the same command without --check" in err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("host: 0.0.0.0", "host: 127.0.0.1"), "router.http.host: 127.0.0.1 cannot be reached"),
        (("device: gpu", "device: gpuu"), "engine.device: 'gpuu'"),
        (("tp: 2", "tp: 16"), "layout: tp 16"),
    ],
)
def test_a_config_that_no_manifest_can_hold_is_one_line(capsys, tmp_path, change, words):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.read_text().replace(*change))
    out, err = run(capsys, "render", path, code=2)
    assert out == ""
    assert len(err.splitlines()) == 1
    assert words in err


def test_check_reads_folders_and_finds_nothing(capsys, tool):
    tool("kubectl")
    out, _ = run(capsys, "check", ROOT / "k8s/overlays/gpu", ROOT / "k8s/overlays/monitoring", "--json")
    assert json.loads(out) == {"objects": 19, "findings": []}


def test_check_reads_stdin_and_names_the_mistake(capsys, monkeypatch, overlays):
    manifests = [m for m in overlays["gpu"] if m["metadata"]["name"] != "pdserve-decode"]
    monkeypatch.setattr("sys.stdin", io.StringIO(yaml.safe_dump_all(manifests)))
    _, err = run(capsys, "check", "-", code=2)
    assert "no PodDisruptionBudget selects its pods" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [("a: [", "not valid YAML"), ("a: 1\n", "without apiVersion and kind"), (None, "is no file and no folder")],
)
def test_what_cannot_be_read_is_one_line(capsys, tmp_path, text, words):
    path = tmp_path / "m.yaml"
    if text is not None:
        path.write_text(text)
    _, err = run(capsys, "check", path, code=2)
    assert len(err.splitlines()) == 1
    assert words in err


def test_environment_is_lines_for_a_shell(capsys):
    out, _ = run(capsys, "environment", CONFIG)
    assert all(line.startswith("export ") for line in out.splitlines())
    assert "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=" in out


def test_every_answer_can_be_json(capsys, tmp_path):
    assert json.loads(run(capsys, "environment", CONFIG, "--json")[0])["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"]
    assert "kind: Component" in json.loads(run(capsys, "render", CONFIG, "--json")[0])["text"]
    folder = tmp_path / "rendered"
    wrote = json.loads(run(capsys, "render", CONFIG, "--out", folder, "--json")[0])["wrote"]
    assert wrote == str(folder / "kustomization.yaml")
    assert json.loads(run(capsys, "render", CONFIG, "--out", folder, "--check", "--json")[0]) == {"up_to_date": wrote}
    board = tmp_path / "board.json"
    assert json.loads(run(capsys, "dashboard", "--out", board, "--json")[0]) == {"wrote": str(board)}


@pytest.mark.parametrize("arguments", [("render", "--serve"), ("render",), ("environment",)])
def test_a_config_that_no_machine_could_serve_is_refused_by_all(capsys, tmp_path, arguments):
    path = tmp_path / "local.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(CONFIG.read_text()) | {"router": {"http": {"host": "127.0.0.1"}}}))
    _, err = run(capsys, *arguments, path, code=2)
    assert "router.http.host" in err or "router.node_resource" in err
