"""The arms of the benchmark of whole models: what they claim about their parameters, and that they train."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from prism import PrismConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_model", ROOT / "benchmarks" / "bench_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_model"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_model"]


def ours(bench):
    return {name: arm for name, arm in bench.ARMS.items() if arm.mixer == "prism"}


def count(config: PrismConfig) -> int:
    """Parameters by the formulas of the model, without building it."""
    d, L, heads = config.d_model, config.n_refine, config.value_heads
    mixer = 5 * d * d + 2 * heads * d + 3 * d * config.short_conv + 2 * heads + config.value_dim
    step = 2 * d * d if config.refine_rank is None else 4 * d * config.refine_rank
    refinement = L * (step + heads * d) + (d * config.anchor_width if L else 0)
    block = mixer + refinement + 2 * d * round(config.mlp_ratio * d) + 2 * d
    return config.vocab_size * d + config.n_layers * block + d


def test_every_arm_has_about_130_million_parameters(bench):
    counts = {name: count(arm.config()) for name, arm in ours(bench).items()}
    assert all(abs(n - counts["L = 0"]) <= 0.003 * counts["L = 0"] for n in counts.values()), counts
    assert 125e6 < counts["L = 0"] < 135e6


def test_arms_build_train_and_are_checked(bench):
    tiny = bench.Size(vocab=32, d=32, layers=2, heads=2, hidden=256, rank=4)
    tokens = bench.batch(16, tiny.vocab, tokens=32, device="cpu")
    assert tokens.shape == (2, 17)
    for name, arm in ours(bench).items():
        model = bench.build(arm, tiny, "cpu")
        assert model.num_parameters() == count(model.config), name
        loss = bench.loss_of(model, "eager")
        found = bench.check(arm, model, loss, tokens, tiny)
        assert found["gradient_error"] < 0.05
        step = bench.step_of(model, loss, tokens)
        losses = [float(step()) for _ in range(3)]
        assert losses[2] < losses[0], (name, losses)


def test_the_check_refuses_a_model_that_computes_something_else(bench):
    tiny = bench.Size(vocab=32, d=32, layers=2, heads=2, hidden=256, rank=4)
    arm, tokens = bench.ARMS["L = 2"], bench.batch(16, 32, tokens=32, device="cpu")
    model = bench.build(arm, tiny, "cpu", anchor="token")
    with pytest.raises(RuntimeError, match="expected the loss and gradients of the reference, came"):
        bench.check(arm, model, bench.loss_of(model, "eager"), tokens, tiny)


def test_rows_name_the_kernels_of_the_scan(bench):
    pytest.importorskip("triton")
    assert bench.scan_of(bench.ARMS["L = 2"], 4096) == "chunkwise"
    assert bench.scan_of(bench.ARMS["fla"], 4096) == "fla"


def test_kernels_are_counted_where_they_belong(bench):
    ours = {"scan_kernel", "short_conv_grad_kernel", "chain_kernel", "refine_grad_kernel"}
    groups = {
        "scan_kernel": "scan",
        "short_conv_grad_kernel": "short convolutions",
        "chain_kernel": "refinement",
        "refine_grad_kernel": "refinement",
        "chunk_fwd_kernel_o": "scan",  # fla's
        "triton_poi_fused_gelu_10": "elementwise, fused",
        "nvjet_sm90_tst_256x128": "matrix products",
        "Memset (Device)": "other",
    }
    assert {name: bench.group_of(name, ours) for name in groups} == groups


def test_the_best_mode_of_an_arm_is_what_is_compared(bench):
    report = sys.modules["_model_report"]
    row = {
        "parameters": 1_000_000,
        "peak_gib": 1.0,
        "check": {"gradient_error": 0.01},
        "scan": "x",
        "T": 2048,
    }
    rows = [
        {**row, "arm": arm, "mode": mode, "ms": ms, "ms_launched": ms, "tokens_per_second": 1e3 / ms}
        for arm, mode, ms in (("L = 0", "eager", 4.0), ("L = 0", "compiled", 2.0), ("L = 2", "compiled", 2.5))
    ]
    rows.append({**row, "arm": "fla", "mode": "eager", "failed": "Error: a | b"})
    rows.append({**rows[2], "mode": "eager", "graph": "not captured"})
    assert report.best(rows)["L = 0", 2048]["mode"] == "compiled"
    assert ("fla", 2048) not in report.best(rows)
    line = bench.table(rows).splitlines()[4]
    assert "| 0.800 | 0.800 |" in line
    assert "a / b" in bench.table(rows)
    assert "| 2.50 (launched) |" in bench.table(rows)
    assert bench.table(rows).count("(launched)") == 1


def test_what_measures_nothing_leaves_earlier_results_alone(bench, tmp_path, monkeypatch, capsys):
    out = tmp_path / "model.json"
    earlier = {"rows": [{"arm": "L = 0", "mode": "compiled", "T": 2048, "ms": 1.0}]}
    out.write_text(json.dumps(earlier))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    turns = [[], [{"arm": "L = 1", "mode": "compiled", "T": 2048, "failed": "out of memory"}]]

    def run(names, args, write):
        write(turns[0])
        return turns[0]

    monkeypatch.setattr(bench, "run", run)
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["bench_model.py", "--out", str(out), "--keep", str(out)])
        with pytest.raises(SystemExit) as ended:
            bench.main()
        assert ended.value.code == 1
        assert "nothing was measured" in capsys.readouterr().err
        assert json.loads(out.read_text()) == earlier
        turns.pop(0)
    row = {"arm": "L = 1", "mode": "compiled", "T": 2048, "ms": 2.0, "parameters": 1, "scan": "x"}
    row |= {"tokens_per_second": 1.0, "ms_launched": 1.0, "peak_gib": 1.0, "check": {"gradient_error": 0.0}}
    earlier["rows"][0] |= {k: v for k, v in row.items() if k not in earlier["rows"][0]}
    out.write_text(json.dumps(earlier))
    turns.append([row])
    bench.main()
    assert [r["arm"] for r in json.loads(out.read_text())["rows"]] == ["L = 0", "L = 1"]


@pytest.mark.skipif(not (ROOT / "benchmarks/results/model_h200.json").exists(), reason="not measured yet")
def test_results_name_their_arms_and_counts(bench, tmp_path):
    document = json.loads((ROOT / "benchmarks/results/model_h200.json").read_text())
    for row in document["rows"]:
        arm = bench.ARMS[row["arm"]]
        assert row["parameters"] == count(arm.config(mixer="prism"))
        assert "failed" in row or torch.isfinite(torch.tensor(row["loss_last"]))
    assert bench.figure(document, tmp_path / "model").stat().st_size > 10_000
