"""`run`: compute what a directory lacks of a grid, in one process or several, and return all rows."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from ablations import store
from ablations.grid import Cell, Grid, count_parameters, grid_from_mapping, state_size
from ablations.trainer import Trainer

_POLL_SECONDS = 0.2
_progress_queue: Any = None


@dataclass(frozen=True)
class _How:
    out: Path
    device: str
    compile: bool
    save_models: bool


def run(
    grid: Grid | Mapping[str, Any],
    out: Path | str,
    *,
    device: str = "cpu",
    workers: int = 1,
    compile: bool = False,
    save_models: bool = False,
    retry_failed: bool = False,
    progress: bool = True,
) -> pd.DataFrame:
    """Train every cell of `grid` that `out` lacks, and return the grid's rows (see `store.load`).

    grid: a Grid, or a mapping as a grid file holds it.

    The seeds of an arm on a task train together as one batched model. Rows are written as soon as their group
    is done.

    device: "cpu", "cuda" or "cuda:N". workers: processes; above 1 each has one thread (a script that calls
    this needs the `if __name__ == "__main__"` guard). compile: torch.compile the loss. save_models: keep the
    trained models, as safetensors under out/models/<key>. retry_failed: compute cells again whose row says
    "error".

    Raises ValueError for a bad argument and where `out` holds another results_version; an exception inside a
    cell does not end the run, it becomes the cell's row.
    """
    if not isinstance(grid, Grid):
        grid = grid_from_mapping(grid)
    if workers < 1:
        raise ValueError(f"workers: expected at least 1, got {workers}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected one that is here, got {device!r} and no CUDA GPU was found")
    how = _How(Path(out), device, compile, save_models)
    store.finished(how.out)  # refuses another results_version before anything is computed
    store.remember_order(how.out, grid.tasks, grid.arms)
    rates: dict[tuple[str, str], float] = {}
    if grid.learning_rates:
        selection = grid.selection_cells()
        _compute(selection, how, workers, retry_failed, progress, "choosing learning rates")
        rates = choose_learning_rates(_rows(selection, how.out))
    report = grid.report_cells(rates)
    _compute(report, how, workers, retry_failed, progress, "training")
    keys = {store.cell_key(cell.configuration()): (cell.task, cell.arm) for cell in report}
    store.retire(how.out, keys)
    return _rows([*(selection if grid.learning_rates else []), *report], how.out)


def default_workers(device: str) -> int:
    """One process per core, at most 4; one on a GPU, which a single ensemble fills."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if device.startswith("cuda") else min(4, cores)


def choose_learning_rates(rows: pd.DataFrame) -> dict[tuple[str, str], float]:
    """(task, arm) -> the learning rate of the best mean validation accuracy among "selection" rows.

    Rates at which a seed failed lose to rates at which none did; ties go to the lower validation loss.
    """
    chosen = {}
    for (task, arm), of_arm in rows[rows["role"] == "selection"].groupby(["task", "arm"], sort=False):
        scored = of_arm.groupby("learning_rate").agg(
            failed=("status", lambda status: (status != "ok").sum()),
            accuracy=("val_accuracy", "mean"),
            loss=("val_loss", "mean"),
        )
        best = scored.sort_values(
            ["failed", "accuracy", "loss"], ascending=[True, False, True], kind="stable"
        )
        chosen[str(task), str(arm)] = float(best.index[0])
    return chosen


def train_group(cells: Sequence[Cell], how: _How, on_step: Callable[[int], None]) -> None:
    """Train cells that differ in their seed only as one batched model and store their rows."""
    first = cells[0]
    rows: list[dict[str, Any]]
    models: list[Any] = []
    try:
        trainer = Trainer(
            first.model,
            first.make_task(),
            first.train,
            [cell.seed for cell in cells],
            device=how.device,
            compile=how.compile,
        )
        rows = trainer.train(on_step)
        models = trainer.models() if how.save_models else []
    except Exception:
        rows = [_error_row(first, traceback.format_exc(limit=-4)) for _ in cells]
    for cell, row, model in itertools.zip_longest(cells, rows, models):
        key = store.cell_key(cell.configuration())
        if model is not None and row["status"] == "ok":
            _save_model(model, how.out / "models" / key)
        store.save(how.out, cell.configuration(), cell.labels(), row, how.device)


def _compute(
    cells: Sequence[Cell], how: _How, workers: int, retry_failed: bool, progress: bool, title: str
) -> None:
    groups = _missing_groups(cells, how.out, retry_failed)
    # Long groups first: the last ones to end are then short, and the workers end together.
    groups.sort(key=_cost, reverse=True)
    total = sum(_cost(group) for group in groups)
    bar = tqdm(
        total=total,
        desc=title,
        disable=not progress,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {postfix} [{elapsed} < {remaining}]",
        mininterval=0.5 if sys.stderr.isatty() else 20.0,  # a log file does not want a line every half second
        dynamic_ncols=True,
    )
    done = 0

    def advance(amount: float) -> None:
        bar.update(min(amount, max(0.0, total - bar.n)))

    with bar:
        bar.set_postfix_str(f"0/{len(groups)} arms", refresh=False)
        if workers == 1 or len(groups) < 2:
            for group in groups:
                share = _cost(group) / group[0].train.steps
                train_group(group, how, lambda _, share=share: advance(share))  # type: ignore[misc]
                done += 1
                bar.set_postfix_str(f"{done}/{len(groups)} arms", refresh=False)
            return
        for amount, ended in _in_processes(groups, how, min(workers, len(groups))):
            advance(amount)
            done += ended
            bar.set_postfix_str(f"{done}/{len(groups)} arms", refresh=False)


def _missing_groups(cells: Sequence[Cell], out: Path, retry_failed: bool) -> list[list[Cell]]:
    have = store.finished(out)
    keyed = [(store.cell_key(cell.configuration()), cell) for cell in cells]
    if retry_failed:
        status = store.statuses(out, [key for key, _ in keyed if key in have])
        have = {key for key in have if status.get(key) != "error"}
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for key, cell in keyed:
        if key in have:
            store.relabel(out, key, cell.labels())
        else:
            groups.setdefault((cell.task, cell.arm, cell.train, cell.role), []).append(cell)
    return list(groups.values())


def _cost(group: Sequence[Cell]) -> float:
    """Rough relative cost, for the order of the groups and the progress bar."""
    first = group[0]
    tokens = first.train.steps * first.train.batch_size * first.make_task().length
    return len(group) * tokens * (count_parameters(first.model) + 2e4) / 1e9


def _in_processes(groups: list[list[Cell]], how: _How, workers: int) -> Iterator[tuple[float, int]]:
    """Yield (progress, groups that ended) while worker processes train the groups."""
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, _start_worker, (messages,))
    try:
        pending: set[Future[None]] = {pool.submit(_work, group, how) for group in groups}
        while pending:
            ended, pending = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in ended:
                future.result()
            yield _drain(messages), len(ended)
        pool.shutdown()
    except BaseException as error:
        # Ctrl-C or a dead worker: what is in flight is given up, what is stored stays.
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise RuntimeError(
                "a worker process died (out of memory?); finished cells are kept, run again to continue"
            ) from error
        raise
    finally:
        messages.cancel_join_thread()
        messages.close()


def _start_worker(messages: Any) -> None:
    import signal

    global _progress_queue
    # Ctrl-C reaches every process of the terminal; the parent decides and ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _progress_queue = messages


def _work(group: list[Cell], how: _How) -> None:
    share = _cost(group) / group[0].train.steps
    every = max(1, group[0].train.steps // 50)

    def on_step(step: int) -> None:
        if step % every == 0:
            _progress_queue.put(share * every)

    train_group(group, how, on_step)


def _drain(messages: Any) -> float:
    amount = 0.0
    with contextlib.suppress(queue.Empty):
        while True:
            amount += messages.get_nowait()
    return amount


def _rows(cells: Sequence[Cell], out: Path) -> pd.DataFrame:
    keys = {store.cell_key(cell.configuration()) for cell in cells}
    rows = store.load(out)
    return rows[rows["key"].isin(keys)].reset_index(drop=True)


def _error_row(cell: Cell, error: str) -> dict[str, Any]:
    """The row of a cell that raised; what can be known without training is filled in."""
    row: dict[str, Any] = {
        "status": "error",
        "error": error,
        "steps_done": 0,
        "state_size": state_size(cell.model),
    }
    with contextlib.suppress(Exception):
        task = cell.make_task()
        row |= {"chance": task.chance, "majority": task.majority, "ceiling": task.ceiling}
        row["parameters"] = count_parameters(cell.model)
    return row


def _save_model(model: Any, folder: Path) -> None:
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
