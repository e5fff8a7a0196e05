"""Engines that generate. A leg pulls the KV that its ticket names, or computes the prompt here without one."""

from __future__ import annotations

from cluster.messages import Role
from cluster.replica import PoolReplica


class DecodeWorker(PoolReplica):
    role = Role.DECODE
