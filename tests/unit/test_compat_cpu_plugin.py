"""The CPU plugin changes what it says it changes, only when asked, and survives a vLLM that has moved on."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest

from kv_transfer import cpu_plugin


class AgentConfig:
    """Like NIXL's binding: `pthrDelay` is a property of the class."""

    def __init__(self) -> None:
        self._delay = 7

    @property
    def pthrDelay(self) -> int:
        return self._delay

    @pthrDelay.setter
    def pthrDelay(self, value: int) -> None:
        self._delay = value


AGENT = """
class nixl_agent:
    def __init__(self):
        self.config = nixlBind.nixlAgentConfig()
        self.config.pthrDelay = 0
"""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A vLLM with the three targets, and nothing switched on."""

    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    api = module("nixl._api", nixlBind=types.SimpleNamespace(nixlAgentConfig=AgentConfig))
    exec(AGENT, api.__dict__)
    loaded: list[str] = []

    def load(name: str) -> Any:
        loaded.append(name)
        return api.nixl_agent if name == "NixlWrapper" else None

    class CpuPlatform:
        @classmethod
        def discover_numa_topology(cls) -> list[list[int]]:
            return [[0, 1]]

    for package in ("vllm", "vllm.distributed.device_communicators", "vllm.platforms"):
        module(package)
    utils = module("vllm.distributed.nixl_utils", _load_nixl_attr=load)
    module("vllm.distributed", nixl_utils=utils)
    shm = module("vllm.distributed.device_communicators.shm_broadcast", sched_yield=lambda: None)
    sys.modules["vllm.distributed.device_communicators"].shm_broadcast = shm  # type: ignore[attr-defined]
    cpu = module("vllm.platforms.cpu", CpuPlatform=CpuPlatform)
    for variable in cpu_plugin.PARTS:
        monkeypatch.delenv(variable, raising=False)
    return types.SimpleNamespace(api=api, utils=utils, shm=shm, cpu=cpu, loaded=loaded)


def switch_on(monkeypatch: pytest.MonkeyPatch, *variables: str) -> None:
    for variable in variables:
        monkeypatch.setenv(variable, "1")


def test_nothing_happens_unless_asked(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_plugin.SLEEP_IN_QUEUE, "0")
    before = (vllm.utils._load_nixl_attr, vllm.shm.sched_yield, vllm.cpu.CpuPlatform.discover_numa_topology())
    cpu_plugin.register()
    after = (vllm.utils._load_nixl_attr, vllm.shm.sched_yield, vllm.cpu.CpuPlatform.discover_numa_topology())
    assert before == after


def test_agents_pause_between_polls(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    switch_on(monkeypatch, cpu_plugin.RELAX_UCX_POLLING)
    cpu_plugin.register()
    assert vllm.loaded == [], "NIXL is imported when vLLM wants it, not before"
    cpu_plugin.register()
    agent_class = vllm.utils._load_nixl_attr("NixlWrapper")
    vllm.utils._load_nixl_attr("NixlWrapper")
    agent = agent_class()
    assert agent.config.pthrDelay == cpu_plugin.UCX_POLL_PAUSE_US
    agent.config.pthrDelay = 250
    assert agent.config.pthrDelay == 250
    assert isinstance(agent.config, AgentConfig)
    assert type(agent.config).__mro__[1] is AgentConfig, "applied once"


def test_each_part_stands_alone(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    switch_on(monkeypatch, cpu_plugin.FREE_MAIN_THREAD)
    spin, load = vllm.shm.sched_yield, vllm.utils._load_nixl_attr
    cpu_plugin.register()
    assert vllm.cpu.CpuPlatform.discover_numa_topology() == []
    assert (vllm.shm.sched_yield, vllm.utils._load_nixl_attr) == (spin, load)


def test_the_queue_sleeps(vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(cpu_plugin.time, "sleep", slept.append)
    switch_on(monkeypatch, cpu_plugin.SLEEP_IN_QUEUE)
    cpu_plugin.register()
    vllm.shm.sched_yield()
    assert slept == [cpu_plugin.QUEUE_SLEEP_S]


def test_a_changed_vllm_is_left_alone_with_one_line_each(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    switch_on(monkeypatch, *cpu_plugin.PARTS)
    del vllm.shm.sched_yield, vllm.utils._load_nixl_attr, vllm.cpu.CpuPlatform.discover_numa_topology
    with caplog.at_level(logging.WARNING):
        cpu_plugin.register()
    assert [record.args[0] for record in caplog.records] == list(cpu_plugin.PARTS)  # type: ignore[index]
    assert all("has no effect" in record.getMessage() for record in caplog.records)
    assert not hasattr(vllm.shm, "sched_yield")


def test_a_changed_nixl_is_left_alone(
    vllm: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    switch_on(monkeypatch, cpu_plugin.RELAX_UCX_POLLING)
    cpu_plugin.register()
    del vllm.api.nixlBind.nixlAgentConfig
    with caplog.at_level(logging.WARNING):
        assert vllm.utils._load_nixl_attr("NixlWrapper") is vllm.api.nixl_agent
    assert "has no effect with this NIXL" in caplog.text


def test_no_vllm_at_all_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    switch_on(monkeypatch, *cpu_plugin.PARTS)
    with caplog.at_level(logging.WARNING):
        cpu_plugin.register()
    assert len(caplog.records) == len(cpu_plugin.PARTS)
