"""`pdserve k8s` where a file cannot be read or written: one line and exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cli import main

CONFIG = Path(__file__).resolve().parents[2] / "k8s" / "overlays" / "gpu" / "config.yaml"


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["k8s", *map(str, arguments)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said
    return " ".join(said.split())


def test_a_file_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.yaml").write_bytes(b"kind: \xff\xfe")
    assert "is not UTF-8 text; give a folder or a YAML file" in fails(capsys, "check", tmp_path / "m.yaml")


def test_places_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    said = fails(capsys, "dashboard", "--out", tmp_path / "none" / "x.json")
    assert "cannot be written (No such file or directory); choose another place" in said
    assert "cannot be written (Not a directory)" in fails(capsys, "render", CONFIG, "--out", tmp_path / "file" / "x")


def test_a_stale_file_that_is_no_text_is_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kustomization.yaml").write_bytes(b"\xff")
    assert "run the same command without --check" in fails(capsys, "render", CONFIG, "--out", tmp_path, "--check")
