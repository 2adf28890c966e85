"""What the benchmark of the scan hands to its peers, and what it concludes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from prism.scan.recurrent import recurrent

pytest.importorskip("triton")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("bench_scan", FOLDER / "bench_scan.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def low_rank_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor) -> Tensor:
    """S_t = diag(exp(gk)) S + b (a^T S) + k v^T, read as q^T S K^-1/2: written for this test alone."""
    S = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        read = torch.einsum("bhk,bhkv->bhv", a[:, t], S)
        S = gk[:, t].exp()[..., None] * S + b[:, t][..., None] * read[..., None, :]
        S = S + k[:, t][..., None] * v[:, t][..., None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(out, 1) * q.shape[3] ** -0.5


@pytest.mark.parametrize("L", [1, 2, 3])
def test_writes_as_subtokens_of_a_low_rank_rule(bench, L):
    g = torch.Generator().manual_seed(0)
    B, T, H, D = 2, 7, 2, 4

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    x = {"q": normal(B, T, H, D), "k": normal(B, T, H, D), "v": normal(B, T, H, D)}
    x |= {"log_decay": -normal(B, T, H).abs(), "beta": normal(B, T, H).sigmoid()}
    x |= {"write_k": normal(B, T, H, L, D), "write_v": normal(B, T, H, L, D)}
    o, _ = recurrent(*(x[n] for n in bench.NAMES), D**-0.5, None, None)
    kind = bench.PARTS["fla DPLR"]
    found = bench.whole(kind, low_rank_rule)(**x)
    assert bench.subtokens(**x)["k"].shape == (B, (L + 1) * T, H, D)
    # gk is float32 by design
    torch.testing.assert_close(found, o, rtol=1e-5, atol=1e-6)


def test_a_ratio_above_one_says_that_ours_is_better(bench):
    def row(kernel: str, L: int, forward: float, both: float, peak: float) -> dict:
        times = {"inference": forward, "forward": forward, "both": both, "peak_mib": peak}
        return {"kernel": kernel, "shape": bench.FIRST, "L": L, **times}

    rows = [
        row("prism", 0, 0.4, 1.2, 700.0),
        row("prism", 2, 0.9, 2.4, 1100.0),
        row("fla", 0, 0.5, 3.6, 350.0),
        row("fla DPLR", 2, 6.0, 24.0, 9000.0),
        {"kernel": "flash-qla", "shape": bench.FIRST, "L": 0, "failed": "Error: | refused"},
    ]
    said = "\n".join(bench.verdicts(rows))
    assert f"L = 0 forward against fla, {bench.FIRST}: 1.25 (must reached" in said
    assert f"L = 0 both against fla, {bench.FIRST}: 3.00 (aim reached" in said
    assert f"L = 2 both against fla's L = 0, {bench.FIRST}: 1.50 (aim reached" in said
    assert f"L = 0 peak memory against fla, {bench.FIRST}: 0.50 (BELOW the must" in said
    assert f"L = 2 both against fla's DPLR, {bench.FIRST}: 10.00 (must reached" in said
    assert "flash-qla" not in said
    assert f"floor by bytes over L = 0 forward, {bench.FIRST}: 0.16 (BELOW the must" in said
    lines = bench.table(rows).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "Error: / refused" in lines[-1]
    assert "1.25, 3.00" in lines[2]


def test_every_shape_of_a_part_has_a_name_that_says_it(bench):
    for name, shape in bench.ALL.items():
        assert name == "x".join(map(str, shape))


def test_the_code_that_was_timed_is_known_without_its_comments(bench, tmp_path):
    def code(text: str) -> str:
        (tmp_path / "a.py").write_text(text)
        return bench.code_of(tmp_path)

    bare = code('def f():\n    return "# no comment"\n')
    assert (
        code('"""About."""\n\ndef f():\n    """f.\n\n    More.\n    """\n    return "# no comment"  # one\n')
        == bare
    )
    assert code('def f():\n    return "# a comment"\n') != bare


def test_the_other_benchmark_gets_all_of_its_options(bench, monkeypatch):
    """Both know --peers and --out: none may be kept back, or peers would be left out without a word."""
    calls = []
    monkeypatch.setattr(bench.subprocess, "call", lambda command: calls.append(command) or 0)
    options = ["--peers", "DIR", "--parts", "fla bfloat16", "--out", "x.json", "--widths", "16"]
    monkeypatch.setattr(sys, "argv", ["bench_scan.py", "--tiny", *options])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 0
    assert calls[0][1].endswith("bench_scan_tiny.py")
    assert calls[0][2:] == options
