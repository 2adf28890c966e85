import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

import ablations
from ablations import report, runner, store
from ablations.grid import Grid, load_grid
from ablations.trainer import Trainer

CHECKOUT = Path(ablations.__file__).resolve().parent.parent
RESULTS = ["status", "test_accuracy", "test_loss", "val_accuracy", "val_loss"]


@pytest.fixture
def grid(grid_file):
    return load_grid(grid_file)


def run(grid, out, **how):
    return runner.run(grid, out, progress=False, **how)


def forget(out, rows):
    """Remove finished cells, as if the run had been interrupted before them."""
    for key in rows["key"]:
        for path in (out / "cells").glob(f"{key}.*"):
            path.unlink()


def test_a_row_per_cell_and_a_second_run_computes_nothing(grid, tmp_path, monkeypatch):
    rows = run(grid, tmp_path / "run")
    assert list(zip(rows["arm"], rows["seed"], strict=True)) == [
        ("PRISM", 0),
        ("PRISM", 1),
        ("GDN", 0),
        ("GDN", 1),
    ]
    assert set(rows["status"]) == {"ok"}
    assert rows["test_accuracy"].between(0, 1).all()
    assert rows["scan_backend"].unique().tolist() == ["chunked"]
    assert (rows["parameters"] > 0).all()
    assert (rows["state_size"] == 64).all()
    assert [list(curve) for curve in rows["curve_step"]] == [[3, 6]] * 4
    monkeypatch.setattr(runner, "Trainer", None)
    again = run(grid, tmp_path / "run")
    pd.testing.assert_frame_equal(rows, again)
    pd.testing.assert_frame_equal(rows, store.load(tmp_path / "run"))


def test_only_what_is_missing_is_computed_and_gives_the_same_numbers(grid, tmp_path, monkeypatch):
    rows = run(grid, tmp_path)
    forget(tmp_path, rows[(rows["arm"] == "GDN") & (rows["seed"] == 1)])
    trained = []

    def spy(config, task, settings, seeds, **how):
        trained.append((config.n_refine, seeds))
        return Trainer(config, task, settings, seeds, **how)

    monkeypatch.setattr(runner, "Trainer", spy)
    again = run(grid, tmp_path)
    assert trained == [(0, [1])]
    pd.testing.assert_frame_equal(rows[RESULTS], again[RESULTS], rtol=1e-4)


def test_two_workers_give_the_rows_of_one(grid, tmp_path):
    one, two = run(grid, tmp_path / "1"), run(grid, tmp_path / "2", workers=2)
    pd.testing.assert_frame_equal(
        one[["arm", "seed", "key", *RESULTS]], two[["arm", "seed", "key", *RESULTS]], rtol=1e-4
    )
    assert torch.get_num_threads() >= 1


def test_an_exception_becomes_the_rows_of_its_cells(grid, tmp_path, monkeypatch):
    def broken(config, *args, **how):
        if config.n_refine == 0:
            raise RuntimeError("no memory <here>")
        return Trainer(config, *args, **how)

    monkeypatch.setattr(runner, "Trainer", broken)
    rows = run(grid, tmp_path)
    assert rows.groupby("arm")["status"].unique().map(list).to_dict() == {"GDN": ["error"], "PRISM": ["ok"]}
    failed = rows[rows["arm"] == "GDN"]
    assert failed["error"].str.contains("no memory <here>").all()
    assert (failed["parameters"] > 0).all()
    assert failed["test_accuracy"].isna().all()
    monkeypatch.undo()
    assert "error" in set(run(grid, tmp_path)["status"])  # a failure is a result until it is asked for again
    assert set(run(grid, tmp_path, retry_failed=True)["status"]) == {"ok"}


def test_renaming_an_arm_trains_nothing(grid, tmp_path, monkeypatch):
    run(grid, tmp_path)
    monkeypatch.setattr(runner, "Trainer", None)
    renamed = dataclasses.replace(grid, arms={"A": grid.arms["PRISM"], "B": {"base": "A", "n_refine": 0}})
    assert run(renamed, tmp_path)["arm"].unique().tolist() == ["A", "B"]


def test_a_learning_rate_is_chosen_on_validation_and_reported_with_fresh_seeds(grid, tmp_path):
    rates = [1e-5, 2e-2]
    tuned = dataclasses.replace(
        grid,
        learning_rates=rates,
        selection_seeds=[10, 11],
        train={**dataclasses.asdict(grid.train), "steps": 40},
    )
    rows = run(tuned, tmp_path)
    assert rows["role"].value_counts().to_dict() == {"selection": 8, "report": 4}
    reported, selection = (rows[rows["role"] == role] for role in ("report", "selection"))
    assert set(reported["seed"]).isdisjoint(selection["seed"])
    for arm in ("PRISM", "GDN"):
        scores = (
            selection[selection["arm"] == arm].groupby("learning_rate")[["val_accuracy", "val_loss"]].mean()
        )
        best = scores.sort_values(["val_accuracy", "val_loss"], ascending=[False, True]).index[0]
        assert reported[reported["arm"] == arm]["learning_rate"].unique().tolist() == [best]


def test_a_rate_at_which_a_seed_diverged_is_not_chosen():
    rows = pd.DataFrame(
        {
            "role": "selection", "task": "t", "arm": "a",
            "learning_rate": [0.1, 0.1, 0.2, 0.2, 0.3, 0.3],
            "status": ["ok", "diverged", "ok", "ok", "ok", "ok"],
            "val_accuracy": [1.0, None, 0.8, 0.8, 0.8, 0.8], "val_loss": [0.0, None, 0.4, 0.4, 0.3, 0.3],
        }
    )  # fmt: skip
    assert runner.choose_learning_rates(rows) == {("t", "a"): 0.3}


def test_saved_models_are_the_trained_ones(grid, tmp_path):
    from ablations import probing

    rows = run(grid, tmp_path, save_models=True)
    row = rows[(rows["arm"] == "PRISM") & (rows["seed"] == 1)].iloc[0]
    (_, model) = next(item for item in probing.load_models(tmp_path, "xor", "PRISM") if item[0] == 1)
    batch = grid.task("xor").batch(16, seed=1, step=0, split="test")
    with torch.no_grad():
        right = (model(batch.inputs).argmax(-1) == batch.targets)[batch.targets != -100]
    assert right.double().mean().item() == pytest.approx(row["test_accuracy"])
    assert not [path for path in (tmp_path / "models").iterdir() if path.name.startswith(".")]


def test_bad_arguments(grid, tmp_path):
    with pytest.raises(ValueError, match="workers: expected at least 1, got 0"):
        run(grid, tmp_path, workers=0)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device: expected one that is here, got 'cuda'"):
            run(grid, tmp_path, device="cuda")


def test_another_grid_under_the_same_names_does_not_mix_into_the_report(grid, tmp_path):
    first = run(grid, tmp_path)
    longer = dataclasses.replace(grid, train={**dataclasses.asdict(grid.train), "steps": 9})
    assert run(longer, tmp_path)["steps_done"].unique().tolist() == [9]
    stored = store.load(tmp_path)
    assert stored.groupby("role")["steps_done"].unique().map(list).to_dict() == {"report": [9], "stale": [6]}
    assert report.summarize(stored)["n"].tolist() == [2, 2]
    pd.testing.assert_frame_equal(run(grid, tmp_path), first)


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_keeps_finished_cells_and_a_rerun_skips_them(tmp_path, workers):
    """A real SIGINT to a running sweep: what is finished survives whole, nothing half-written counts."""
    content = {
        "tasks": {"xor": {"length": 16}},
        "arms": {
            f"GDN {width}": {"preset": "gdn", "d_model": width, "n_layers": 1, "mlp_ratio": 0}
            for width in (4, 6, 8)
        },
        "seeds": [0],
        "train": {
            "steps": 1,
            "batch_size": 2,
            "eval_every": 1,
            "val_size": 2,
            "test_size": 2,
            "warmup_steps": 0,
        },
        # The largest cost is trained first, so the two long arms are put after the short one by their cost.
        "overrides": [{"arm": f"GDN {width}", "steps": 100_000, "batch_size": 1} for width in (6, 8)],
    }
    script = tmp_path / "sweep.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import json, sys
            from ablations import runner
            from ablations.grid import Grid
            runner._cost = lambda group: 1.0 / group[0].train.steps  # short ones first
            if __name__ == "__main__":
                grid = Grid(**json.loads({json.dumps(content)!r}))
                runner.run(grid, sys.argv[1], workers={workers}, progress=False)
            """
        )
    )
    out = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script), str(out)],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not list((out / "cells").glob("*.parquet")):
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline, "the first cell did not finish"
            time.sleep(0.1)
        time.sleep(0.5)  # well into the long ones
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in error
    rows = store.load(out)
    assert rows["arm"].tolist() == ["GDN 4"]
    assert rows["status"].tolist() == ["ok"]
    # The same grid with its long arms made short: the finished cell is not trained again.
    short = Grid(**{**content, "overrides": []})
    before = next((out / "cells").glob("*.parquet")).stat().st_mtime_ns
    again = run(short, out)
    assert again["status"].tolist() == ["ok"] * 3
    assert (out / "cells" / f"{rows['key'].iloc[0]}.parquet").stat().st_mtime_ns == before
