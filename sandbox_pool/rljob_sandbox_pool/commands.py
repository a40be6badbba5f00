"""The `rljob sandbox` commands: thin, each imports what it needs when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rljob_sandbox_pool.cli.state import State
    from rljob_sandbox_pool.cli.where import Options

StateDir = Annotated[
    Path | None, typer.Option("--state", metavar="DIR", help="Where claims are kept.")
]
Url = Annotated[str | None, typer.Option("--url", help="Address of a broker.")]
Token = Annotated[str | None, typer.Option("--token", help="What opens it.")]
Relay = Annotated[
    bool, typer.Option("--relay", help="With --url: reach sandboxes by way of the broker.")
]
Namespace = Annotated[
    str | None,
    typer.Option("-n", "--namespace", help="Of the cluster of KUBECONFIG."),
]
Job = Annotated[str | None, typer.Option("--job", help="With -n: the job whose pools they are.")]
OfPool = Annotated[
    str | None, typer.Option("--pool", help="With -n: the SandboxPool, where it is no job's.")
]
OperatorNamespace = Annotated[
    str, typer.Option("--operator-namespace", help="With -n: where rljob is installed.")
]
Env = Annotated[
    list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="A variable. Repeatable.")
]
Claim = Annotated[str, typer.Argument(metavar="CLAIM", help="A name that claim printed.")]

OPERATOR_NAMESPACE = "rljob-system"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    sandbox = typer.Typer(
        help="Warm sandboxes: claim, use, release.", no_args_is_help=True, rich_markup_mode=None
    )
    commands = (serve, pools, claim, execute, cp, ls, release, reap)
    for command in commands:
        sandbox.command("exec" if command is execute else None)(command)
    app.add_typer(sandbox, name="sandbox")


def serve(
    file: Annotated[
        Path | None, typer.Option("-f", "--filename", help="A SandboxPool or an RLJob.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Of the pool (default).")] = None,
    warm: Annotated[int | None, typer.Option("--warm", help="Kept ready (2).")] = None,
    maximum: Annotated[int | None, typer.Option("--max", help="At most (4).")] = None,
    port: Annotated[int, typer.Option("--port", help="Of 127.0.0.1; 0: any free one.")] = 0,
    state: StateDir = None,
) -> None:
    """Keep sandboxes warm on this machine until Ctrl-C."""
    from rljob_sandbox_pool.cli import serve as implementation

    implementation.main(file, name=name, warm=warm, maximum=maximum, port=port, state=_state(state))


def pools(
    url: Url = None,
    token: Token = None,
    namespace: Namespace = None,
    job: Job = None,
    pool: OfPool = None,
    operator_namespace: OperatorNamespace = OPERATOR_NAMESPACE,
    state: StateDir = None,
) -> None:
    """Show the pools and what is ready in them."""
    from rljob_sandbox_pool.cli import claims as implementation

    implementation.pools(_options(state, url, token, namespace, job, pool, operator_namespace))


def ls(
    url: Url = None,
    token: Token = None,
    namespace: Namespace = None,
    job: Job = None,
    pool: OfPool = None,
    operator_namespace: OperatorNamespace = OPERATOR_NAMESPACE,
    state: StateDir = None,
) -> None:
    """List the claims that are held."""
    from rljob_sandbox_pool.cli import claims as implementation

    implementation.ls(_options(state, url, token, namespace, job, pool, operator_namespace))


def claim(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="Name of a pool.")],
    image: Annotated[str | None, typer.Option("--image", help="One of the pool's.")] = None,
    env: Env = None,
    ttl: Annotated[float, typer.Option("--ttl", help="Seconds until it ends by itself.")] = 3600.0,
    idle: Annotated[
        float | None, typer.Option("--idle", help="Seconds unused until it ends by itself.")
    ] = None,
    priority: Annotated[int, typer.Option("--priority", help="-100 to 100.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait for one.")] = 600.0,
    url: Url = None,
    token: Token = None,
    relay: Relay = False,
    namespace: Namespace = None,
    job: Job = None,
    operator_namespace: OperatorNamespace = OPERATOR_NAMESPACE,
    state: StateDir = None,
) -> None:
    """Take a sandbox; prints the claim's name."""
    from rljob_sandbox_pool.cli import claims as implementation

    of_pool = None if job or not namespace else pool
    options = _options(state, url, token, namespace, job, of_pool, operator_namespace, relay=relay)
    implementation.claim(
        options,
        pool,
        image=image,
        env=env or [],
        ttl=ttl,
        idle=idle,
        priority=priority,
        timeout=timeout,
    )


def execute(
    name: Claim,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD...", help="The command and its arguments.")
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds; then it is killed: 124.")
    ] = 600.0,
    with_stdin: Annotated[bool, typer.Option("-i", "--stdin", help="Send it our stdin.")] = False,
    on_terminal: Annotated[
        bool, typer.Option("-t", "--tty", help="On a terminal: what is typed goes to it.")
    ] = False,
    env: Env = None,
    cwd: Annotated[str | None, typer.Option("--cwd", help="Its folder (/workspace).")] = None,
    state: StateDir = None,
) -> None:
    """Run a command in a sandbox; its exit code is ours."""
    from rljob_sandbox_pool.cli import execute as implementation

    code = implementation.main(
        _state(state),
        name,
        command or [],
        timeout=timeout,
        env=env or [],
        cwd=cwd,
        with_stdin=with_stdin,
        on_terminal=on_terminal,
    )
    raise typer.Exit(code)


def cp(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A path, or CLAIM:/path.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="CLAIM:/path, or a path.")],
    state: StateDir = None,
) -> None:
    """Copy files and folders in or out."""
    from rljob_sandbox_pool.cli import copy as implementation

    implementation.main(_state(state), source, target)


def release(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="CLAIM...", help="Names, or ids that ls shows.")
    ] = None,
    all_of_them: Annotated[
        bool, typer.Option("--all", help="Every claim that was made here.")
    ] = False,
    url: Url = None,
    token: Token = None,
    namespace: Namespace = None,
    job: Job = None,
    pool: OfPool = None,
    operator_namespace: OperatorNamespace = OPERATOR_NAMESPACE,
    state: StateDir = None,
) -> None:
    """Give sandboxes back."""
    from rljob_sandbox_pool.cli import claims as implementation

    options = _options(state, url, token, namespace, job, pool, operator_namespace)
    implementation.release(options, names or [], all_of_them=all_of_them)


def reap(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    namespace: Namespace = None,
    state: StateDir = None,
) -> None:
    """Remove what is left of pools that are no more."""
    from rljob_sandbox_pool.cli import reap as implementation

    implementation.main(_state(state), namespace, dry_run=dry_run)


def _state(folder: Path | None) -> State:
    from rljob_sandbox_pool.cli.state import State, default_folder

    return State(folder or default_folder())


def _options(
    state: Path | None,
    url: str | None,
    token: str | None,
    namespace: str | None,
    job: str | None,
    pool: str | None,
    operator_namespace: str,
    *,
    relay: bool = False,
) -> Options:
    from rljob_sandbox_pool.cli.where import Options

    return Options(_state(state), url, token, relay, namespace, job, pool, operator_namespace)
