"""The `pdserve` command.

Each subcommand is one module of `cluster/commands/`, imported only when it is asked for, so that `--help`
and mistakes answer at once. A user's mistake (`UserError`) ends as one line on stderr and exit status 2.
"""

from __future__ import annotations

import importlib
import sys
from typing import cast

import typer

from cluster.commands.output import complain
from cluster.errors import UserError

# name -> (module, one line of help). A module has `command` (a function) or `app` (a typer group).
COMMANDS: dict[str, tuple[str, str]] = {
    "simulate": ("simulate", "a workload against a simulated cluster, in virtual time"),
    "fit": ("fit", "measure an engine and write the profile that simulator and planner read"),
    "experiment": ("experiment", "run every combination of a file's axes in the simulator; plots and a report"),
    "plan": ("plan", "capacity, speculative decoding and topology, before the GPUs are bought"),
    "check": ("check", "validate a config and print its topology; starts nothing"),
    "demo": ("demo", "one chat through a real split, and where its time went"),
    "status": ("status", "pools, replicas, load, leases, goodput of a running cluster"),
    "serve": ("serve", "start a cluster and serve until told to stop"),
    "loadtest": ("loadtest", "put a scenario to an endpoint: goodput, latencies, a report"),
    "diagnose": ("diagnose", "which symptoms are present, the numbers that show them, the lever"),
    "reference": ("reference", "published figures of the field beside what this code computes"),
    "k8s": ("k8s", "Kubernetes manifests from a config, and a check of them"),
}


# typer's own base of everything that is wrong with a command line.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])


def _build(names: list[str]) -> typer.Typer:
    root = typer.Typer(
        name="pdserve",
        help="Serve a large language model from separate prefill and decode pools, scaled on goodput.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    root.callback()(lambda: None)
    for name in names:
        module_name, summary = COMMANDS[name]
        module = importlib.import_module(f"cluster.commands.{module_name}")
        if hasattr(module, "app"):
            root.add_typer(module.app, name=name, short_help=summary)
        else:
            root.command(name, short_help=summary)(module.command)
    return root


def main(argv: list[str] | None = None) -> None:
    """Entry point of the console script."""
    args = sys.argv[1:] if argv is None else argv
    names = [args[0]] if args and args[0] in COMMANDS else list(COMMANDS)
    try:
        status = _build(names)(args=args, prog_name="pdserve", standalone_mode=False)
    except UserError as mistake:
        complain(str(mistake))
        raise SystemExit(2) from None
    except _UsageError as mistake:
        if "\n" in mistake.format_message():  # the help, of a command that was given nothing
            mistake.show()
        else:
            path = mistake.ctx.command_path if mistake.ctx is not None else "pdserve"
            complain(f"{mistake.format_message().rstrip('.')}; see `{path} --help`")
        raise SystemExit(2) from None
    except typer.Abort:
        raise SystemExit(130) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if isinstance(status, int) and status:
        raise SystemExit(status)


if __name__ == "__main__":
    main()
