"""Which prefill engines may ship KV to which decode engines, by what they report about themselves.

In a healthy cluster every pair may, and `groups` costs one comparison. While a changed configuration is rolled out old
and new engines meet, and only pairs of one kind may transfer: then a request is placed within a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from cluster.messages import Role, WorkerInfo
from kv_transfer.compatibility import Refusal, TpPairs, check_pair


class HasInfo(Protocol):
    @property
    def info(self) -> WorkerInfo: ...


W = TypeVar("W", bound=HasInfo)


class Pairing:
    """Remembers the verdict on every pair of live engines.

    Args:
        tp_pairs: see `kv_transfer.tp_pairs` of the configuration.
    """

    def __init__(self, tp_pairs: TpPairs = "tested") -> None:
        self._tp_pairs = tp_pairs
        self._infos: dict[str, WorkerInfo] = {}
        self._refused: dict[tuple[str, str], list[Refusal]] = {}

    def add(self, info: WorkerInfo) -> None:
        """Judge a new engine (or a new incarnation of one) against every engine of the other pool."""
        self.remove(info.worker_id)
        self._infos[info.worker_id] = info
        for other in self._infos.values():
            if {info.role, other.role} != {Role.PREFILL, Role.DECODE}:
                continue
            prefill, decode = (info, other) if info.role is Role.PREFILL else (other, info)
            refusals = check_pair(prefill.fingerprint, decode.fingerprint, tp_pairs=self._tp_pairs)
            if refusals:
                self._refused[prefill.worker_id, decode.worker_id] = refusals

    def remove(self, worker_id: str) -> None:
        self._infos.pop(worker_id, None)
        for pair in [pair for pair in self._refused if worker_id in pair]:
            del self._refused[pair]

    def refusals(self, prefill_id: str, decode_id: str) -> list[Refusal]:
        """Why this pair may not transfer; empty where it may."""
        return self._refused.get((prefill_id, decode_id), [])

    @property
    def refused(self) -> int:
        return len(self._refused)

    def groups(self, prefills: Sequence[W], decodes: Sequence[W]) -> list[tuple[Sequence[W], Sequence[W]]]:
        """Split both pools so that within a group every pair may transfer; engines without any partner are left out."""
        if not self._refused:
            return [(prefills, decodes)] if prefills and decodes else []
        by_sources: dict[tuple[str, ...], tuple[list[W], list[W]]] = {}
        for decode in decodes:
            sources = [p for p in prefills if (p.info.worker_id, decode.info.worker_id) not in self._refused]
            if sources:
                key = tuple(p.info.worker_id for p in sources)
                by_sources.setdefault(key, (sources, []))[1].append(decode)
        return list(by_sources.values())
