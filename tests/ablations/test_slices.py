"""Accuracy by slice from saved models, and its weighting."""

import json

import pandas as pd
import pytest

from ablations import runner, slices
from ablations.grid import load_grid


def scores(*lines):
    return pd.DataFrame(
        lines, columns=["task", "arm", "seed", "length", "accuracy", "chance_corrected", "answers"]
    )


def test_saved_models_score_what_the_run_scored(grid_file, tmp_path):
    content = json.loads(grid_file.read_text())
    content["tasks"] = {"mqar": {"length": 16, "pairs": 3, "queries": 2, "vocab_size": 24}}
    grid_file.write_text(json.dumps(content))
    rows = runner.run(load_grid(grid_file), tmp_path, save_models=True, progress=False)
    found = slices.accuracy_by(tmp_path, "pair", rows=content["train"]["test_size"])
    assert len(found) == 2 * 2 * 3
    for row in rows.itertuples():
        own = found[(found["arm"] == row.arm) & (found["seed"] == row.seed)]
        stored = json.loads(row.test_slices)["pair"]
        assert dict(zip(own["pair"], own["answers"], strict=True)) == {
            int(p): n for p, (_, n) in stored.items()
        }
        for pair, accuracy in zip(own["pair"], own["accuracy"], strict=True):
            assert accuracy == pytest.approx(stored[str(pair)][0], abs=1e-6)
        corrected = (own["accuracy"] - row.chance) / (row.ceiling - row.chance)
        assert own["chance_corrected"].tolist() == pytest.approx(corrected.tolist())
        (whole,) = slices.beyond(own, "pair", 0)["accuracy"]
        assert whole == pytest.approx(row.test_accuracy)
    assert slices.accuracy_by(tmp_path, "pair", arms=["GDN"])["arm"].unique().tolist() == ["GDN"]
    with pytest.raises(ValueError, match=r"by: expected one of .*pair.* on mqar, got 'colour'"):
        slices.accuracy_by(tmp_path, "colour")


def test_beyond_counts_every_answer_once_between_both_ends():
    given = scores(
        ("t", "a", 0, 1, 0.0, -1.0, 10),
        ("t", "a", 0, 2, 1.0, 1.0, 30),
        ("t", "a", 0, 3, 0.5, 0.0, 10),
        ("t", "a", 0, 4, 0.9, 0.8, 90),
        ("t", "a", 1, 2, 0.25, -0.5, 4),
    )
    found = slices.beyond(given, "length", 2, 3)
    assert found["seed"].tolist() == [0, 1]
    assert found["answers"].tolist() == [40, 4]
    assert found["accuracy"].tolist() == pytest.approx([0.875, 0.25])
    assert found["chance_corrected"].tolist() == pytest.approx([0.75, -0.5])
    assert slices.beyond(given, "length", 3)["answers"].tolist() == [100]


def test_plots_show_every_arm_with_its_seeds():
    given = scores(
        *(("t", arm, s, n, 0.5 + n / 20, n / 10, 5) for arm in "ab" for s in range(3) for n in range(1, 9))
    )
    ax = slices.plot_by(given, "length", "t", trained_to=4, bins=4)
    lines = {line.get_label(): line for line in ax.lines}
    assert {"a (n = 3)", "b (n = 3)", "chance", "ceiling", "longest training word"} <= set(lines)
    assert lines["a (n = 3)"].get_ydata() == pytest.approx([0.15, 0.35, 0.55, 0.75])
    rows = pd.DataFrame(
        {
            "task": "t", "role": "report", "status": "ok", "arm": ["GDN 8", "GDN 16", "GDN 8", "GDN 16"],
            "state_size": [64, 256, 64, 256], "test_accuracy": [0.5, 0.75, 0.75, 1.0], "chance": 0.5,
            "ceiling": 1.0,
        }
    )  # fmt: skip
    (line,) = (x for x in slices.plot_by_state(rows, "t", ["GDN"]).lines if "GDN" in x.get_label())
    assert line.get_label() == "GDN (n = 2 each)"
    assert line.get_xdata().tolist() == [64, 256]
    assert line.get_ydata() == pytest.approx([0.25, 0.75])
