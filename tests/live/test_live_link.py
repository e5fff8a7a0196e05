"""The link between router and worker over loopback: order, framing, refusal, and word of a lost end."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import uvloop

from cluster.link import LinkClient, LinkServer
from cluster.wire import Cancel, Load, Message, Output, Settle, Step

pytestmark = pytest.mark.live


TICKET = {"remote_block_ids": [[1, 2, 3]], "remote_engine_id": "e", "remote_port": 5, "remote_blocks_expiry_time": None}


# Serve's replicas run on uvloop, whose transports are not asyncio's.
loops = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


class Ends:
    def __init__(self) -> None:
        self.at_router: list[tuple[str, str, Message]] = []
        self.at_worker: list[tuple[str, Message]] = []
        self.lost: list[str] = []
        self.changed = asyncio.Event()

    async def until(self, done) -> None:
        async with asyncio.timeout(30):
            while not done():
                self.changed.clear()
                await self.changed.wait()

    def router_message(self, worker_id: str, incarnation: str, message: Message) -> None:
        self.at_router.append((worker_id, incarnation, message))
        self.changed.set()

    def worker_message(self, router_id: str, message: Message) -> None:
        self.at_worker.append((router_id, message))
        self.changed.set()

    def is_lost(self, name: str, *_: object) -> None:
        self.lost.append(name)
        self.changed.set()


@loops
def test_messages_of_every_size_arrive_in_order_both_ways_and_a_lost_end_is_told(new_loop) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(talk())


async def talk() -> None:
    ends = Ends()
    server = LinkServer(ends.router_message, ends.is_lost)
    address = await server.start("r", "127.0.0.1")
    link = await LinkClient.connect(address, "w", "i", ends.worker_message, ends.is_lost)
    outputs = [
        Output("a", 0, [1, 2], kv_transfer_params=TICKET, finish_reason="length", queue_s=0.5),
        Output("b", 3, [4], stop_reason="x", logprobs=(1, 2, b"ids", b"logs", b"ranks")),
        Output("c", 0, [], error=("TransferFailed", "gone")),
        Output("d", 0, list(range(100_000))),
    ]
    load = Load("ready", 1, 2, 3, 4, 5, 6)
    for output in outputs:
        link.send(Step([output], load))
    await ends.until(lambda: len(ends.at_router) == len(outputs))
    assert [m.outputs[0].request_id for _, _, m in ends.at_router if isinstance(m, Step)] == ["a", "b", "c", "d"]
    first, second, third, fourth = (m for _, _, m in ends.at_router)
    assert isinstance(first, Step) and isinstance(second, Step) and isinstance(third, Step) and isinstance(fourth, Step)
    assert first.outputs[0].kv_transfer_params == TICKET and first.load == load
    assert list(second.outputs[0].logprobs) == [1, 2, b"ids", b"logs", b"ranks"]
    assert third.outputs[0].error == ("TransferFailed", "gone")
    assert fourth.outputs[0].token_ids == list(range(100_000))
    assert server.send("w", Settle(["x"], True)) and server.send("w", Cancel(["y"]))
    assert not server.send("nobody", Cancel(["y"]))
    await ends.until(lambda: len(ends.at_worker) == 2)
    assert ends.at_worker == [("r", Settle(["x"], True)), ("r", Cancel(["y"]))]
    link.close()
    await ends.until(lambda: "w" in ends.lost)
    await server.close()


@pytest.mark.parametrize("bad", ["secret", "garbage", "huge"])
@loops
def test_a_stranger_is_refused_before_anything_it_says_is_believed(bad: str, new_loop) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(refuse(bad))


async def refuse(bad: str) -> None:
    ends = Ends()
    server = LinkServer(ends.router_message, ends.is_lost)
    address = await server.start("r", "127.0.0.1")
    if bad == "secret":
        await LinkClient.connect(
            dataclasses.replace(address, secret="0" * 32), "w", "i", ends.worker_message, ends.is_lost
        )
        await ends.until(lambda: "r" in ends.lost)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"\x00\x00\x00\x05hello" if bad == "garbage" else b"\xff\xff\xff\xff")
        try:
            assert await asyncio.wait_for(reader.read(), 30) == b""
        except ConnectionResetError:
            pass
        writer.close()
    assert ends.at_router == []
    await server.close()
