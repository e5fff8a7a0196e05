"""Deliberate mistakes, each refused with a line that names it, and by that line alone in what it is about."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml
from k8s_server import mistakes, patch

from cluster.kubernetes.manifests import where

TABLE = yaml.safe_load((Path(__file__).parent / "mistakes.yaml").read_text())


def test_the_table_is_long_and_says_each_thing_once():
    assert len(TABLE) >= 30
    names = [entry["mistake"] for entry in TABLE]
    assert len(set(names)) == len(names)


@pytest.fixture(scope="module")
def right(overlays):
    return [*overlays["gpu"], *overlays["monitoring"]]


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry["mistake"])
def test_a_mistake_is_refused(entry, right, crds):
    manifests = copy.deepcopy(right)
    if "add_object" in entry:
        changed = entry["add_object"]
        manifests.append(changed)
    else:
        (changed,) = (m for m in manifests if where(m) == entry["object"])
        patch(changed, entry.get("patch", []))
        if "serve" in entry:
            serve = patch(yaml.safe_load(changed["spec"]["serveConfigV2"]), entry["serve"])
            changed["spec"]["serveConfigV2"] = yaml.safe_dump(serve, sort_keys=False)
        if "replace_text" in entry:
            changed["data"] = {k: v.replace(*entry["replace_text"]) for k, v in changed["data"].items()}
    found = mistakes(manifests, crds, only=changed)
    assert any(entry["refused"] in line for line in found), "\n".join(found) or "accepted"
