"""A command line that cannot be read: one line that names the option and the way to the help, exit status 2."""

from __future__ import annotations

import pytest

from cluster.cli import main


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
