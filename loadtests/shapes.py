"""Load curves for Locust, in a file of their own because a shape takes over `--users` as soon as it is loaded:

    locust -f loadtests/locustfile.py,loadtests/shapes.py --pd-shape diurnal -u 40 -t 30m --headless

`-u` is the peak and `-t` the length. The curves are in `curves.py`.
"""

from __future__ import annotations

from typing import Any

from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser
from locust.util.timespan import parse_timespan

from loadtests.curves import CURVES, users_at


@events.init_command_line_parser.add_listener
def shape_option(parser: LocustArgumentParser) -> None:
    parser.add_argument("--pd-shape", default="ramp", choices=sorted(CURVES), help="how users change over the run")


class CurveShape(LoadTestShape):
    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        options: Any = self.runner.environment.parsed_options
        length = options.run_time or 60
        length_s = float(parse_timespan(length)) if isinstance(length, str) else float(length)
        users = users_at(options.pd_shape, self.get_run_time(), length_s, options.num_users or 10)
        # All at once: a slow spawn rate would be a second curve on top of this one.
        return None if users is None else (users, float(max(users, 1)))
