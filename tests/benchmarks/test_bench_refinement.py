"""That the benchmark's definition of the refinement is the model's, whatever `Refinement` looks like now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_definition_runs_and_is_the_chain(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("bench_refinement", FOLDER / "bench_refinement.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    g = torch.Generator().manual_seed(0)
    r, gain = torch.randn(1, 3, 2, 4, generator=g), torch.randn(1, 3, 2, 2, 4, generator=g)
    gate = torch.rand(1, 3, 2, 2, generator=g)
    first = F.gelu(gain[..., 0, :] * r)
    second = F.gelu(gain[..., 1, :] * (r - first))
    torch.testing.assert_close(
        bench.definition(2)(r, gain, gate), gate[..., None] * torch.stack([first, second], 3)
    )
