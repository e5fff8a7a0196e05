"""Words of users and servers are printed as they are: brackets in them are no markup."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from cluster.cli import main
from cluster.commands import demo, diagnose
from cluster.commands.waiting import Waiting

RECORD: dict[str, Any] = {
    "path": "split",
    "ttft_s": 0.1,
    "tpot_s": 0.01,
    "stage_s": {"router_queue": 0.01, "prefill_compute": 0.05, "kv_transfer": 0.01, "decode_step": 0.03},
    "prefill_worker": "prefill[/0]",
    "decode_worker": "decode[/0]",
    "prompt_tokens": 9,
    "cached_tokens": 0,
    "transfer_blocks": 1,
    "transfer_bytes": 4096,
    "output_tokens": 3,
    "decode_computed_tokens": 1,
}


def test_a_question_with_brackets_is_asked_and_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    local = ModuleType("cluster.runtime.local")
    cluster = SimpleNamespace(ready_s={"total": 1.0}, url="http://127.0.0.1:1", stop=lambda progress: None)
    local.__dict__.update(free_port=lambda host: 8000, start=lambda config, progress: cluster)
    monkeypatch.setitem(sys.modules, "cluster.runtime.local", local)
    monkeypatch.setattr(demo, "_ask", lambda *args, **options: "an answer")
    monkeypatch.setattr(demo, "_record", lambda url: RECORD)
    demo.command("what is [/INST] in :smile: [bold]?", None, None, None, 8, False)
    shown = capsys.readouterr().out
    assert "> what is [/INST] in :smile: [bold]?" in shown
    assert "prefill[/0]: 9 tokens" in shown


def test_warnings_keep_the_names_in_brackets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    pool = {"replicas": {"min": 1, "max": 1}}
    raw = {
        "kv_transfer": {"port_min": 20000, "port_max": 20004},
        "pools": {"prefill": pool, "decode": {**pool, "accelerator": "card[a]"}},
    }
    path.write_text(yaml.safe_dump(raw))
    main(["check", str(path)])
    printed = capsys.readouterr()
    assert "would need 6 ports, [kv_transfer.port_min, port_max] has 5" in printed.err
    assert "card[a]" in printed.out


def test_styles_are_our_own_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with Waiting("starting [b]x[/b]") as waiting:
        waiting("worker[/0]: [red]engine[/red]", 1.0)
    _show_finding()
    printed = capsys.readouterr()
    assert "starting [b]x[/b]: waiting for worker[/0]: [red]engine[/red] (1 s)" in printed.err
    assert "run[/1]: 3 requests" in printed.out and "note: from [/tmp]" in printed.out


def _show_finding() -> None:
    source = SimpleNamespace(name="run[/1]", evidence={"requests": 3.0}, note="from [/tmp]")
    diagnose._show(source, [], all_rules=False)  # type: ignore[arg-type]
