"""A folder with a model of a chosen shape: the packaged one's tokenizer, and a configuration without weights.

vLLM fills it with random weights (`load_format: dummy`). What is measured is time, which does not depend on them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import cluster.models
from loadtests.fidelity.plan import Shape

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_model(shape: Shape, folder: Path) -> Path:
    """Returns the folder's absolute path."""
    tiny = Path(next(iter(cluster.models.__path__))) / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copy(tiny / name, folder / name)
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    config |= {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder.resolve()
