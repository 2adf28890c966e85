"""The ``prism`` command. Every command parses its options, calls one function, and says what to read next.

Exit codes: 0 success; 1 a check failed; 2 a bad argument; 130 interrupted. Libraries are imported inside the
commands: ``prism --help`` must not wait for torch.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="prism",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Test what PRISM's rank-L writes do for small sequence models, with Gated DeltaNet beside.\n\n"
    "Start with [bold]prism demo[/bold]: a few minutes on a CPU, a table, and figures under runs/demo.",
)
tasks_app = typer.Typer(
    invoke_without_command=True, help="List the tasks, or look at one (prism tasks show xor)."
)
app.add_typer(tasks_app, name="tasks")

Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda or cuda:N.")]
Workers = Annotated[
    int | None, typer.Option(help="Worker processes, one thread each (default: one per core, at most 4).")
]
RunDirectory = Annotated[Path, typer.Argument(help="Directory of a run, for example runs/demo.")]


def friendly(command: Callable[..., None]) -> Callable[..., None]:
    """Bad input becomes one line and exit code 2, Ctrl-C exit code 130; PRISM_TRACEBACK=1 shows where."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo(
                "\nInterrupted. Finished cells are kept: the same command goes on from there.", err=True
            )
            raise typer.Exit(130) from None
        except (ValueError, FileNotFoundError, ImportError) as error:
            if os.environ.get("PRISM_TRACEBACK"):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None

    return wrapped


@app.command()
@friendly
def demo(
    out: Annotated[Path, typer.Option(help="Where cells, models, table and figures go.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per arm (with one there are no intervals).")] = 6,
    device: Device = "cpu",
    workers: Workers = None,
) -> None:
    """Run the quick ablation: eight arms on xor, parity and mqar. Prints a table and what it found.

    Run again, it computes only what is missing.
    """
    from ablations.demo import run_demo

    run_demo(out, seeds, device, workers)


@app.command()
@friendly
def verify(device: Device = "cpu") -> None:
    """Prove that L = 0 is Gated DeltaNet, and the other identities. Exit code 1 where a comparison fails."""
    from ablations.verification import run_and_print

    if not run_and_print(device):
        raise typer.Exit(1)


@app.command()
@friendly
def ablate(
    grid_file: Annotated[
        Path | None, typer.Argument(help="A grid in YAML, TOML or JSON (tasks, arms, seeds, train ...).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the run is stored.")] = Path("runs/ablation"),
    task: Annotated[
        list[str] | None, typer.Option(help="A task and parameters: 'xor length=64'. Repeatable.")
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="A preset and fields: 'prism anchor=token d_model=32'. Repeatable."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0 .. N-1 (without a grid file).")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Training steps (without a grid file).")] = 500,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step (without a grid file).")] = 64,
    learning_rate: Annotated[
        list[float] | None,
        typer.Option(
            help="One: used as it is. Several: each arm's is chosen on validation, with three other seeds."
        ),
    ] = None,
    device: Device = "cpu",
    workers: Workers = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Pass the training loss through torch.compile.")
    ] = False,
    save_models: Annotated[
        bool, typer.Option("--save-models", help="Keep trained models, for prism probe.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Compute cells that raised again.")
    ] = False,
) -> None:
    """Train a grid of (task, arm, seed), from a file or from flags, and report all that the directory holds.

    prism ablate grid.yaml --out runs/mine

    prism ablate --task "xor length=32" --arm "gdn d_model=16" --arm "prism d_model=16" --steps 300
    """
    from ablations import grid, report, runner, store

    if grid_file is not None and (task or arm):
        raise ValueError("grid_file: expected either a grid file or --task and --arm, got both")
    wanted = (
        grid.load_grid(grid_file)
        if grid_file is not None
        else grid.from_flags(task or [], arm or [], seeds, steps, batch_size, learning_rate or [3e-3])
    )
    runner.run(
        wanted,
        out,
        device=device,
        workers=runner.default_workers(device) if workers is None else workers,
        compile=compile,
        save_models=save_models,
        retry_failed=retry_failed,
    )
    report.print_report(store.load(out), report.write_report(out))


@app.command()
@friendly
def report(
    run: RunDirectory, figures: Annotated[bool, typer.Option(help="Draw the figures too.")] = True
) -> None:
    """Build table, findings and figures of a run again from its stored cells."""
    from ablations import report as reports
    from ablations import store

    reports.print_report(store.load(run), reports.write_report(run, figures))


@app.command()
@friendly
def probe(
    run: RunDirectory,
    measure: Annotated[
        list[str] | None, typer.Option(help="What to measure; repeatable. Default: rank and residual.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Only this task; of a saved model, its task and parameters.")
    ] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm; repeatable.")] = None,
    sequences: Annotated[
        int, typer.Option(min=1, help="Test sequences per model (what fits or scores reads more).")
    ] = 8,
) -> None:
    """Look into the trained models of a run, and draw what a probe measures in each arm.

    [bold]Rank[/bold]: update-rank, state-rank, window-rank.\n
    [bold]Refinement[/bold]: residual-decay, step-cosines, anchor-fidelity, anchor-horizon, gain-fidelity,
    solver-fidelity (arms that lack what is measured are left out).\n
    [bold]Memory[/bold]: transition, readback, perturbation-growth.\n
    [bold]Use[/bold]: readout, causal-share.

    Figures go to RUN/figures. The run must have kept its models (prism demo does, prism ablate with
    --save-models). A folder that save_pretrained wrote does too: prism probe FOLDER --task "mqar length=24".
    """
    from ablations import probing

    if (run / "config.json").is_file():
        if task is None or arm:
            raise ValueError("task: expected --task 'NAME key=value ...' and no --arm with a saved model")
        paths = probing.draw_saved(run, task, measure, sequences)
    else:
        paths = probing.draw_many(run, measure, task, arm, sequences)
    for path in paths:
        typer.echo(path)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@friendly
def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="One benchmark, for example training; default: all.")
    ] = None,
) -> None:
    """Run the benchmarks of a checkout (benchmarks/bench_*.py).

    Options after a name go to that script: prism bench training --device cuda
    """
    from ablations.benchmarks import run_benchmarks

    if run_benchmarks(name, context.args):
        raise typer.Exit(1)


@tasks_app.callback()
def _tasks(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        _list_tasks()


@friendly
def _list_tasks() -> None:
    from ablations.report import console
    from tasks.gallery import describe

    console().print(describe())


@tasks_app.command("show")
@friendly
def show(
    name: Annotated[str, typer.Argument(help="A task's name, with parameters if you like: 'xor length=16'.")],
    examples: Annotated[int, typer.Option("-n", min=1, help="How many sequences.")] = 3,
) -> None:
    """Show a task: what it asks, its parameters, and sequences with their answers explained."""
    from ablations.grid import parse_task
    from ablations.report import console
    from tasks.gallery import render

    _, params = parse_task(name)
    console().print(render(params.pop("task"), examples, **params))


def main() -> None:
    """Entry point of the `prism` script."""
    app(prog_name="prism" if not sys.argv[0].endswith("__main__.py") else "python -m ablations")


if __name__ == "__main__":
    main()
