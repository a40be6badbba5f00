"""The operator's commands: thin, each imports what it needs when it is called."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

RunsDir = Annotated[Path, typer.Option("--runs-dir", help="Where runs are kept.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Override a key, e.g. rollout.schedule=sync. Repeatable.",
    ),
]
RunName = Annotated[str | None, typer.Argument(help="Name of the run; without it the newest.")]
RunOption = Annotated[
    str | None, typer.Option("--run", help="Name of the run; without it the newest.")
]
Namespace = Annotated[
    str | None,
    typer.Option("-n", "--namespace", help="Look at this namespace of the cluster of KUBECONFIG."),
]
Manifest = Annotated[Path, typer.Argument(help="The YAML file.")]

RUNS = Path("runs")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (run, apply, plan, doctor, status, logs, stop, trajectories, export):
        app.command()(command)
    ledger = typer.Typer(
        help="Look at a run's ledger.", no_args_is_help=True, rich_markup_mode=None
    )
    ledger.command()(audit)
    app.add_typer(ledger, name="ledger")


def run(
    manifest: Manifest,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run of this name where it stopped.")
    ] = False,
    assignments: Assignments = None,
    runs_dir: RunsDir = RUNS,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")] = False,
) -> None:
    """Train on this machine.

    Starts every component, shows what goes on, and stops everything at the end or at Ctrl-C.
    """
    command = [
        sys.executable,
        "-m",
        "rljob_operator.local",
        str(manifest),
        "--runs-dir",
        str(runs_dir),
    ]
    command += [part for text in assignments or [] for part in ("--set", text)]
    command += ["--resume"] * resume + ["--plain"] * plain
    sys.stdout.flush()
    os.execv(sys.executable, command)  # one process less, and signals reach the driver itself


def plan(
    manifest: Annotated[Path | None, typer.Argument(help="The YAML file.")] = None,
    filename: Annotated[
        Path | None, typer.Option("-f", "--filename", help="The YAML file, as kubectl names it.")
    ] = None,
    assignments: Assignments = None,
    namespace: Annotated[
        str | None, typer.Option("-n", "--namespace", help="As --cluster, for this namespace.")
    ] = None,
    in_cluster: Annotated[
        bool, typer.Option("--cluster", help="Beside the nodes of the cluster of KUBECONFIG.")
    ] = False,
    output: Annotated[str, typer.Option("-o", "--output", help="text or json.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
) -> None:
    """Print what a manifest turns into.

    Its components, the bytes that each step moves, the sandboxes that its rows need, and what does not fit.
    """
    from rljob.errors import ManifestError
    from rljob_operator.show import plan_text

    file = manifest or filename
    if file is None or (manifest and filename):
        raise ManifestError("plan", "needs one manifest", "rljob plan -f rljob.yaml")
    if output not in {"text", "json"}:
        raise ManifestError("-o", f"{output!r} is no form", "use text or json")
    made = plan_text.make(
        file, assignments or [], in_cluster=in_cluster or namespace is not None, namespace=namespace
    )
    print(plan_text.as_json(made) if as_json or output == "json" else plan_text.describe(made))


def doctor(
    manifest: Annotated[
        Path | None, typer.Argument(help="Also check what this manifest needs.")
    ] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Check what this machine has and what it lacks."""
    from rljob_operator.show import doctor as implementation

    raise typer.Exit(implementation.main(manifest, runs_dir))


def apply(
    manifest: Annotated[Path, typer.Option("-f", "--filename", help="The YAML file.")],
    assignments: Assignments = None,
    namespace: Namespace = None,
) -> None:
    """Hand a checked manifest to the cluster."""
    from rljob_operator.show import cluster

    cluster.apply(manifest, assignments or [], namespace)


def status(name: RunName = None, namespace: Namespace = None, runs_dir: RunsDir = RUNS) -> None:
    """Show the runs, or one in detail; -n: of a cluster."""
    if namespace is not None:
        from rljob_operator.show import cluster

        cluster.status(name, namespace)
        return
    from rljob_operator.show import status as implementation

    implementation.main(name, runs_dir)


def logs(
    component: Annotated[str | None, typer.Argument(help="E.g. trainer; without it all.")] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on as lines are written.")
    ] = False,
    lines: Annotated[int, typer.Option("--tail", min=0, help="Last lines per component.")] = 20,
    run_name: RunOption = None,
    namespace: Namespace = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Print what components wrote; -n: in a cluster."""
    if namespace is not None:
        from rljob_operator.show import cluster

        cluster.logs(component, follow=follow, lines=lines, name=run_name, namespace=namespace)
        return
    from rljob_operator.show import logs as implementation

    implementation.main(component, follow=follow, lines=lines, name=run_name, runs_dir=runs_dir)


def stop(name: RunName = None, runs_dir: RunsDir = RUNS) -> None:
    """Stop a run; run --resume goes on with it."""
    from rljob_operator.show import stop as implementation

    implementation.main(name, runs_dir)


def trajectories(
    show: Annotated[
        str | None, typer.Option("--show", metavar="ID", help="One episode, turn by turn.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Only those trained at this step.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many to list.")] = 40,
    run_name: RunOption = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """List episodes, or show one turn by turn.

    With its tokens, masks, log probabilities and policy versions.
    """
    from rljob_operator.show import trajectories as implementation

    implementation.main(show=show, step=step, limit=limit, name=run_name, runs_dir=runs_dir)


def export(
    to: Annotated[
        Path, typer.Option("--to", help="Folder to write; it must not exist or be empty.")
    ],
    version: Annotated[
        str | None, typer.Option("--version", help="E.g. 1-16; without it the newest.")
    ] = None,
    run_name: RunOption = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Copy weights out for vLLM to serve, verified."""
    from rljob_operator.show import export as implementation

    implementation.main(to, version=version, name=run_name, runs_dir=runs_dir)


def audit(name: RunName = None, runs_dir: RunsDir = RUNS) -> None:
    """Check that nothing is lost or trained twice.

    Reconciles workers' logs, archived batches and the ledger.
    """
    from rljob_operator.show import audit as implementation

    raise typer.Exit(implementation.main(name, runs_dir))
