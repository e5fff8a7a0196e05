"""Tools and built overlays for the manifest tests. What a machine lacks is skipped, and says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("cpu-demo", "gpu", "monitoring")
TOOLS = Path(sys.prefix) / "k8s-tools" / "usr" / "bin"


def find_tool(name: str) -> str:
    """Path of a program: the machine's, or the one that `make k8s-tools` unpacked."""
    found = shutil.which(name) or shutil.which(name, path=str(TOOLS))
    if found is None:
        pytest.skip(f"SKIPPED FOR WANT OF A TOOL: no {name} here; `make k8s-tools` fetches it from Debian's packages")
    return found


def kustomize(folder: Path) -> str:
    done = subprocess.run([find_tool("kubectl"), "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, f"{folder}: {done.stderr}"
    return done.stdout


@pytest.fixture(scope="session", autouse=True)
def _import_ray():
    """Once, with its own deprecation warnings off: here warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray.serve.schema  # noqa: F401

        import cluster.app  # noqa: F401


@pytest.fixture(scope="session")
def tool():
    return find_tool


@pytest.fixture(scope="session")
def build():
    """folder -> manifests, by the real kustomize."""
    from cluster.kubernetes.manifests import load

    def call(folder: Path) -> list[dict[str, Any]]:
        return load(kustomize(folder), str(folder))

    return call


@pytest.fixture(scope="session")
def overlays(build) -> dict[str, list[dict[str, Any]]]:
    return {name: build(ROOT / "k8s" / "overlays" / name) for name in OVERLAYS}


@pytest.fixture(scope="session")
def crds():
    from k8s_schemas import load_all

    folder = ROOT.parent / "shared" / "k8s-schemas"
    if not folder.is_dir():
        pytest.skip(f"SKIPPED FOR WANT OF SCHEMAS: no {folder}; custom resources are not checked on this machine")
    return load_all(folder)


@pytest.fixture
def overlay_copy(tmp_path):
    """A copy of k8s/ to change."""
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    return tmp_path / "k8s"
