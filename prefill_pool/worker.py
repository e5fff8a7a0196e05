"""Engines that process prompts. A leg of kind `prefill` ends in a ticket and stays open until its KV was pulled."""

from __future__ import annotations

from cluster.messages import Role
from cluster.replica import PoolReplica


class PrefillWorker(PoolReplica):
    role = Role.PREFILL
