"""TCP ports for engines, so that any number of replicas share a node.

An engine binds its side channel long after its port was chosen: it starts in between, for seconds to minutes. So
a port is reserved by name for that time: an abstract UNIX socket, `\\0pdserve-port-N`, bound by the replica. Two
replicas on a node cannot bind the same name, containers that share the node's network share these names too, and
the kernel drops a name when its holder dies, however it dies. The range lies outside the kernel's ephemeral ports,
so that no outgoing connection of another program takes a reserved port in the meantime.
"""

from __future__ import annotations

import errno
import random
import socket
from types import TracebackType

from cluster.errors import UserError


class PortReservation:
    """Consecutive ports that no other replica on this node gets until `close` or the end of this process."""

    def __init__(self, ports: range, holds: list[socket.socket]) -> None:
        self.ports = ports
        self._holds = holds

    @property
    def first(self) -> int:
        return self.ports.start

    def close(self) -> None:
        """Give the ports back. Idempotent."""
        while self._holds:
            self._holds.pop().close()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def reserve(count: int, *, lowest: int, highest: int, rng: random.Random | None = None) -> PortReservation:
    """Reserve `count` consecutive free ports of [lowest, highest].

    Consecutive because an engine with attention-DP ranks adds the rank to its port.

    Raises:
        UserError: no such run of ports is free.
    """
    rng = rng or random.Random()
    starts = range(lowest, highest - count + 2)
    if starts:
        # From a random start on, in order: replicas that start together look at different ports first.
        turn = rng.randrange(len(starts))
        for start in (*starts[turn:], *starts[:turn]):
            if reservation := _try_reserve(range(start, start + count)):
                return reservation
    raise UserError(
        f"no {count} consecutive free ports in [{lowest}, {highest}] on this node; "
        "widen kv_transfer.port_min and kv_transfer.port_max"
    )


def _try_reserve(ports: range) -> PortReservation | None:
    holds: list[socket.socket] = []
    reservation = PortReservation(ports, holds)
    for port in ports:
        hold = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        holds.append(hold)
        try:
            hold.bind(f"\0pdserve-port-{port}")
        except OSError as e:
            reservation.close()
            if e.errno == errno.EADDRINUSE:
                return None
            raise
        if not _free(port):
            reservation.close()
            return None
    return reservation


def _free(port: int) -> bool:
    """Nothing listens there, pdserve or not. A connection that is only closing does not count: engines reuse it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
