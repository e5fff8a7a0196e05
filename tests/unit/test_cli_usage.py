"""A command line that cannot be read: one line that names the option and the way to the help, exit status 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cluster.cli import COMMANDS, _build, main
from cluster.commands.output import command_line


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["fit", "--repeats", "two"], "--repeats"),
        (["fit", "--repeats", "0"], "--repeats"),
        (["simulate"], "CONFIG"),
        (["plan", "topology"], "--"),
        (["status", "--nosuch"], "--nosuch"),
        (["nosuch"], "nosuch"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    assert named in said.err
    assert "--help" in said.err


def test_nothing_at_all_gives_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    assert "Usage" in "".join(capsys.readouterr())


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if not inner:
        yield path, command
        return
    for name, one in inner.items():
        yield from _commands(one, f"{path} {name}")


ALL = dict(_commands(typer.main.get_command(_build(list(COMMANDS))), "pdserve"))


@pytest.mark.parametrize("path", ALL)
def test_every_command_can_answer_in_json(path: str) -> None:
    assert "--json" in {name for parameter in ALL[path].params for name in parameter.opts}


@pytest.mark.parametrize("path", ALL)
def test_every_help_has_an_example_of_this_command(path: str) -> None:
    said = re.sub(r"\[/?bold\]", "", ALL[path].help or "")
    assert "Example" in said and path in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:9", "--shape", "llama3-8b"], "--url measures a running cluster"),
        (["c.yaml", "--shape", "llama3-8b"], "--shape measures bare layers"),
        (["c.yaml", "--model", "smollm2"], "--model: says nothing about what a config measures; leave it out"),
        (["--url", "http://127.0.0.1:9", "--model", "x"], "--model: says nothing about what --url measures"),
        (["c.yaml", "--tp", "2", "--dtype", "float16"], "--dtype, --tp: says nothing about what a config measures"),
        (["--layers", "4"], "--layers: says nothing about what an engine measures"),
        (["--shape", "llama3-8b", "--max-batch", "8"], "--max-batch: says nothing about what --shape measures"),
        (["--url", "ftp://x"], "--url: 'ftp://x' is no http or https address"),
    ],
)
def test_fit_refuses_what_it_would_ignore(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["fit", *arguments])
    assert end.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("option", ["--out", "--samples"])
def test_fit_looks_for_room_before_it_measures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    with pytest.raises(SystemExit) as end:
        main(["fit", option, "taken/p.json"])
    assert end.value.code == 2
    assert f"{option}: no file can be written in 'taken'" in " ".join(capsys.readouterr().err.split())


def test_a_command_is_recorded_without_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pdserve", "fit", "--url", "http://x", "--api-key", "s3", "--out", "a b"])
    assert command_line("s3") == "pdserve fit --url http://x --api-key KEY --out 'a b'"
    monkeypatch.setattr("sys.argv", ["pdserve", "loadtest", "smoke", "--api-key=s3"])
    assert command_line("s3") == "pdserve loadtest smoke --api-key=KEY"
    assert command_line(None) == "pdserve loadtest smoke --api-key=s3"


def test_the_demo_refuses_a_cluster_with_keys_before_it_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("router: {tenants: {header: x-tenant}}")
    with pytest.raises(SystemExit) as end:
        main(["demo", "--config", str(path)])
    assert end.value.code == 2
    assert "router.tenants.header: the demo says nothing of who asks" in " ".join(capsys.readouterr().err.split())
