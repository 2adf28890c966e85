import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import ablations
from ablations import claims, demo, figures, probing, runner, store
from ablations.grid import count_parameters

CHECKOUT = Path(ablations.__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The demo's grid with three steps of training and two seeds, run with models kept."""
    out = tmp_path_factory.mktemp("demo")
    grid = demo.demo_grid(2)
    short = {"steps": 3, "warmup_steps": 1, "eval_every": 3, "val_size": 8, "test_size": 8, "batch_size": 4}
    grid = dataclasses.replace(grid, train=short, overrides=())
    return out, runner.run(grid, out, save_models=True, progress=False)


def test_learning_rates_are_the_recorded_choice():
    path = CHECKOUT / "benchmarks" / "results" / "demo_learning_rates.json"
    record = json.loads(path.read_text())
    assert record["chosen"] == demo.LEARNING_RATES
    assert record["selection_seeds"] == list(demo.SELECTION_SEEDS)
    assert record["results_version"] == store.RESULTS_VERSION
    for task, arms in demo.LEARNING_RATES.items():
        assert set(arms) == set(demo.ARMS)
        for arm, rate in arms.items():
            scores = [s for s in record["scores"] if (s["task"], s["arm"]) == (task, arm)]
            assert {s["learning_rate"] for s in scores} == set(demo.CANDIDATE_RATES)
            best = max(scores, key=lambda s: (s["val_accuracy"], -s["val_loss"]))
            assert best["learning_rate"] == rate


def test_the_grid_is_what_it_says():
    grid = demo.demo_grid()
    assert set(grid.tasks) == {"xor", "parity", "mqar"}
    assert len(grid.seeds) >= 5
    assert set(grid.seeds).isdisjoint(demo.SELECTION_SEEDS)
    for task in grid.tasks:
        prism, wide = (count_parameters(grid.model(arm, task)) for arm in ("PRISM", "GDN widened"))
        assert wide == pytest.approx(prism, rel=0.05)
        assert grid.model("GDN widened", task).n_refine == 0
        assert grid.settings("PRISM", task).learning_rate == demo.LEARNING_RATES[task]["PRISM"]


def test_every_ingredient_has_its_own_contrast(tiny):
    _, rows = tiny
    found = {(c.task, c.field): (c.arm, c.against) for c in claims.contrasts(rows)}
    for task in demo.TASKS:
        assert found[task, "short_conv"] == ("GDN + short conv", "GDN")
        assert found[task, "n_refine"] == ("PRISM", "GDN")
        assert found[task, "activation"] == ("PRISM", "PRISM, no GELU")
        assert found[task, "anchor"] == ("PRISM", "PRISM, token anchor")
        assert found[task, "gain"] == ("PRISM", "PRISM, no gain")
        assert found[task, "residual"] == ("PRISM", "PRISM, no subtraction")


def test_probes_join_the_seeds_of_an_arm(tiny):
    out, _ = tiny
    assert len(probing.load_models(out, "mqar", "PRISM")) == 2
    data = probing.measure(out, "residual_decay", "mqar", "PRISM", sequences=3)
    assert (data.sizes["seed"], data.sizes["sample"]) == (2, 3)
    assert probing.measure(out, "causal_share", "xor", "PRISM").sizes["seed"] == 2
    assert data.sizes["step"] == 3
    ranks = probing.measure(out, "update_rank", "mqar", "GDN", sequences=2)
    assert float(ranks["numerical"].max()) == 1.0
    assert probing.arms_with_models(out, "xor") == [("xor", arm) for arm in demo.ARMS]
    for measure, arms in demo.INSIDE.items():
        path = probing.draw(out, measure, "mqar", arms, sequences=2)
        assert path.stat().st_size > 5000
        assert path.with_suffix(".pdf").exists()
    drawn = probing.draw_many(out, ["residual-decay"], task="xor", sequences=1)
    assert [path.name for path in drawn] == ["residual_decay_xor.png"]


def test_probing_names_what_is_missing(tiny, tmp_path):
    out, _ = tiny
    with pytest.raises(ValueError, match="measure: expected one of"):
        probing.measure(out, "magic", "mqar", "PRISM")
    with pytest.raises(ValueError, match="arm: expected one of"):
        probing.load_models(out, "mqar", "PRIMS")
    with pytest.raises(ValueError, match="arm: expected one of"):
        probing.draw_many(out, arms=["PRIMS"])
    with pytest.raises(ValueError, match=r"task: expected one of \['xor', 'parity', 'mqar'\], got 'xro'"):
        probing.draw_many(out, task="xro")
    with pytest.raises(FileNotFoundError, match="no finished cell"):
        probing.draw_many(tmp_path)


def test_panels_of_a_measure(tiny, monkeypatch):
    """Limits are shared by panels of lines; a category of a knock-out is never outside its panel."""
    out, _ = tiny
    drawn = {}
    monkeypatch.setattr(figures, "save", lambda figure, stem: drawn.update({stem.name: figure}) or stem)
    arms = ["GDN", *(arm for arm in demo.ARMS if arm.startswith("PRISM"))]
    for measure in ("causal_share", "transition", "readout"):
        probing.draw(out, measure, "xor", arms, sequences=2)
    for ax in drawn["causal_share_xor"].axes:
        low, high = sorted(ax.get_ylim())
        assert all(low < tick < high for tick in ax.get_yticks())
        assert ax.yaxis_inverted()
    assert [t.get_text() for t in drawn["causal_share_xor"].axes[1].get_yticklabels()] == [
        "no step 1", "no step 2", "no refinement", "no base write", "no erase", "no anchor convolution",
    ]  # fmt: skip
    panels = drawn["transition_xor"].axes
    assert len({ax.get_ylim() for ax in panels}) == 1
    assert [bool(ax.get_ylabel()) for ax in panels] == [True, False, False, False, True, False]
    assert drawn["transition_xor"].get_figwidth() == pytest.approx(4 * figures.PANEL[0])
    for ax in drawn["readout_xor"].axes:
        assert any(np.isfinite(line.get_ydata()).all() and len(line.get_ydata()) for line in ax.lines)


def test_arms_that_lack_what_is_measured_are_left_out_and_never_silently_all(tiny, monkeypatch):
    out, _ = tiny
    drawn = {}
    monkeypatch.setattr(probing, "draw", lambda _, name, task, arms, n: drawn.update({name: arms}) or name)
    probing.draw_many(out, ["gain-fidelity", "anchor-fidelity", "transition"], task="xor")
    refining = [arm for arm in demo.ARMS if arm.startswith("PRISM")]
    assert drawn["gain_fidelity"] == [arm for arm in refining if arm != "PRISM, no gain"]
    assert drawn["anchor_fidelity"] == refining
    assert drawn["transition"] == list(demo.ARMS)
    with pytest.raises(ValueError, match="gain_fidelity reads 'gain', which no mixer of these arms has: GDN"):
        probing.draw_many(out, ["gain-fidelity"], arms=["GDN"])
    with pytest.raises(ValueError, match="measure: expected one of update_rank"):
        probing.draw_many(out, ["update-rank", "magic"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_line_from_task_to_figure_on_a_gpu(tmp_path, capsys):
    rows = demo.run_demo(tmp_path, seeds=2, device="cuda")
    assert set(rows["status"]) == {"ok"}
    assert set(rows["scan_backend"]) == {"triton"}
    assert set(rows["device"]) == {"cuda"}
    assert "scan backend that ran: triton" in capsys.readouterr().out
    solved = rows[(rows["task"] == "xor") & (rows["arm"] == "PRISM")]["test_accuracy"]
    assert solved.min() > 0.9
    assert len(list((tmp_path / "figures").glob("*.png"))) == 5
