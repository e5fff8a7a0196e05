"""The Dockerfile, without an engine to build it: pinned, non-root, complete, and its steps that can run here do."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
IGNORE = (ROOT / ".dockerignore").read_text().splitlines()


def instructions():
    """(stage, instruction, rest) of each step, continuation lines joined."""
    stage = None
    joined = re.sub(r"\\\n\s*", " ", TEXT)
    for line in joined.splitlines():
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = rest.split(" AS ")[1]
        yield stage, word, rest


STEPS = list(instructions())
TARGETS = ("cpu", "gpu")


def test_the_base_is_pinned_and_every_stage_builds_on_it():
    (base,) = (rest.split("=")[1] for _, word, rest in STEPS if word == "ARG")
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", base)
    origins = [rest.split(" AS ")[0] for _, word, rest in STEPS if word == "FROM"]
    assert origins == ["${PYTHON_IMAGE}", "${PYTHON_IMAGE}", "runtime", "runtime"]


@pytest.mark.parametrize("target", TARGETS)
def test_the_last_user_is_not_root_and_is_the_manifests(target, overlays):
    (user,) = (rest for stage, word, rest in STEPS if stage == target and word == "USER")
    service = next(m for m in overlays["cpu-demo"] if m["kind"] == "RayService")
    security = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["securityContext"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"


def test_python_packages_come_from_lock_files_only():
    commands = [part for _, word, rest in STEPS if word == "RUN" for part in re.split(r"&&|\|\|", rest)]
    pip = [shlex.split(command) for command in commands if command.strip().startswith("pip ")]
    assert len(pip) == 6
    assert all("--no-deps" in words for words in pip)
    for target in TARGETS:
        assert any(
            word == "COPY" and rest.startswith(f"requirements/{target}.lock") for s, word, rest in STEPS if s == target
        )


def test_what_is_copied_exists_and_is_sent_to_the_builder():
    kept = [line[1:].rstrip("/") for line in IGNORE if line.startswith("!")]
    assert IGNORE[1] == "*"
    copied = [rest.split()[:-1] for _, word, rest in STEPS if word == "COPY" and not rest.startswith("--from")]
    for source in (source for group in copied for source in group):
        assert (ROOT / source).exists(), source
        assert any(Path(source.rstrip("/")).match(pattern) for pattern in kept), source


def test_tags_are_those_of_the_overlays():
    tags = set(re.findall(r"-t (\S+)", TEXT))
    used = set()
    for name, target in (("cpu-demo", "cpu"), ("gpu", "gpu")):
        text = (ROOT / "k8s" / "overlays" / name / "kustomization.yaml").read_text()
        tag = re.search(r"newTag: (\S+)", text).group(1)
        assert tag.endswith(f"-{target}")
        used.add(f"pdserve:{tag}")
    assert used == tags


def test_the_wheel_holds_what_runs(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("pdserve-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in ("cluster/app.py", "cluster/kubernetes/render.py", "kv_transfer/cpu_plugin.py", "router/app.py"):
        assert needed in names
    assert any(name.startswith("cluster/models/") and name.endswith(".safetensors") for name in names)
    assert not any(name.startswith(("tests/", "k8s/")) for name in names)
