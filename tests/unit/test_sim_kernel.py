"""Virtual time."""

from __future__ import annotations

from cluster.sim.kernel import Kernel


def test_calls_run_in_order_of_time_and_ties_in_order_of_making() -> None:
    kernel, seen = Kernel(), []
    kernel.at(2.0, seen.append, "late")
    kernel.at(1.0, seen.append, "first")
    kernel.at(1.0, seen.append, "second")
    kernel.at(1.5, lambda: kernel.after(0.0, seen.append, "now"))
    gone = kernel.at(1.2, seen.append, "never")
    gone.cancel()
    kernel.run()
    assert seen == ["first", "second", "now", "late"]
    assert (kernel.now, kernel.events) == (2.0, 5)


def test_a_run_may_stop_and_the_past_is_now() -> None:
    kernel, seen = Kernel(), []
    kernel.at(5.0, seen.append, 5)
    kernel.run(until_s=3.0)
    assert (kernel.now, seen) == (3.0, [])
    kernel.at(1.0, lambda: seen.append(kernel.now))
    kernel.run()
    assert seen == [3.0, 5]
