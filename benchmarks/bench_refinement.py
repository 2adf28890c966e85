"""The refinement and the scan behind it on one GPU: three ways from r^1, p and b to the scan's output.

    PYTHONPATH=. python benchmarks/bench_refinement.py

    eager      `Refinement.forward` step by step, then the scan
    compiled   the same chain under torch.compile, then the scan
    operator   `prism.scan.triton.chain.chain`, then the scan

A fourth way, `fused`, with the chain inside the scan's kernels, was measured and dropped (NOTES.md, "Fused
refinement"); its rows stay in the results, where new rows replace only their own path and L.

bfloat16, GELU, (B, T, H, D) = (4, 4096, 16, 128). Correctness before timing: relative error |x - r| / |r|
of the output and of every gradient against the chain and `chunked` in float64, on inputs rounded to bfloat16
first and with NaN in memory not yet written. Times are medians of do_bench in milliseconds: `inference`
without gradients, `forward` with what backward needs kept, `both` with the gradient of every input; `chain`
leaves the scan out. Peaks are MiB beyond the inputs over one forward and backward pass.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_scan import COPY, NAMES, version
from bench_scan import inputs as scan_inputs
from bench_scan import measure as measure_scan

from prism import PrismConfig, prism_scan
from prism.refinement import Refinement
from prism.scan.chunked import chunked
from prism.scan.triton import _operator, chunkwise

NEEDS_GPU = True
SHAPE = (4, 4096, 16, 128)
STEPS = (1, 2, 4)
Inputs = dict[str, Tensor]
Run = Callable[..., Tensor]


def inputs(shape: tuple[int, int, int, int], L: int, seed: int = 0) -> Inputs:
    """What the scan takes, with r^1, gains and step gates in the place of write_v."""
    x = scan_inputs(shape, L, seed)
    g = torch.Generator("cuda").manual_seed(seed + 1)
    x["gain"] = torch.randn(x["write_v"].shape, device="cuda", generator=g).bfloat16()
    x["gate"] = torch.randn(x["gain"].shape[:-1], device="cuda", generator=g).sigmoid().bfloat16()
    x["r"] = torch.randn(x["v"].shape, device="cuda", generator=g).bfloat16()
    del x["write_v"]
    return x


def definition(L: int) -> Run:
    """r, gain, gate -> write_v as `Refinement.forward` makes it, its projections given."""
    refinement = Refinement(PrismConfig(vocab_size=2, n_refine=L, residual_start="value"))
    refinement.project = lambda u, given: (u, *given)  # type: ignore[method-assign]
    return lambda r, gain, gate: refinement(r, r, (gain, gate)).write_v


def scan(x: Inputs, write_v: Tensor) -> Tensor:
    tensors = (x[n] for n in NAMES if n != "write_v")
    return prism_scan(*tensors, write_v, backend="triton", validate=False)[0]  # type: ignore[misc]


def chain_of(name: str, L: int) -> Run:
    if name == "eager":
        return definition(L)
    if name == "compiled":
        torch._dynamo.reset()
        return torch.compile(definition(L), dynamic=False)
    from prism.scan.triton.chain import chain

    return chain


def path(name: str, L: int) -> Run:
    """Inputs -> o."""
    chain = chain_of(name, L)
    return lambda **x: scan(x, chain(x["r"], x["gain"], x["gate"]))


def errors(run: Run, L: int) -> dict[str, float]:
    """Relative errors of o and of every gradient; two heads, the reference in float64."""
    B, T, _, D = SHAPE
    x = inputs((B, T, 2, D), L, seed=1)
    do = torch.randn_like(x["v"])
    exact = {n: a.double().requires_grad_() for n, a in x.items()}
    write_v = definition(L)(exact["r"], exact["gain"], exact["gate"])
    o, _ = chunked(*(exact[n] for n in NAMES if n != "write_v"), write_v, D**-0.5, None, None)
    grads = torch.autograd.grad(o, list(exact.values()), do.double())
    reference = dict(zip(("o", *x), (o, *grads), strict=True))
    leaves = {n: a.clone().requires_grad_() for n, a in x.items()}
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    o = run(**leaves)
    found = dict(zip(("o", *x), (o, *torch.autograd.grad(o, list(leaves.values()), do)), strict=True))
    torch.use_deterministic_algorithms(False)
    return {n: float((found[n].detach().double() - r).norm() / r.norm()) for n, r in reference.items()}


def measure(run: Run, x: Inputs) -> dict[str, float]:
    """As of a scan, on leaves of its own."""
    return measure_scan(run, {n: a.detach() for n, a in x.items()})


def kernel_times(run: Run, x: Inputs) -> dict[str, float]:
    """Microseconds of each kernel in a forward and backward pass, in order of first launch: the median of six
    passes' launches times their number."""
    leaves = {n: a.detach().requires_grad_() for n, a in x.items()}
    upstream = torch.randn_like(run(**leaves))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(6):
            torch.autograd.grad(run(**leaves), list(leaves.values()), upstream)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_time:
            times.setdefault(event.name, []).append(event.device_time)
    return {name: sorted(t)[len(t) // 2] * round(len(t) / 6) for name, t in times.items() if len(t) >= 6}


def floor_ms(L: int) -> dict[str, float]:
    """Milliseconds to move each input and result of the chain once."""
    B, T, H, D = SHAPE
    wide = 2 * B * T * H * D / COPY * 1e3
    return {"chain_forward": (1 + 2 * L) * wide, "chain_both": (3 + 5 * L) * wide}


def rows(names: list[str], steps: list[int], profile: bool = True) -> Any:
    for L in steps:
        x = inputs(SHAPE, L)
        for name in names:
            run = path(name, L)
            row: dict[str, Any] = {"path": name, "L": L, "errors": errors(run, L), **measure(run, x)}
            if profile:
                row["kernel_us"] = kernel_times(run, x)
            alone = {n: x[n] for n in ("r", "gain", "gate")}
            row["chain"] = measure(chain_of(name, L), alone)
            yield row


def table(found: list[dict[str, Any]]) -> str:
    base = {(r["path"], r["L"]): r for r in found}
    columns = [
        "L",
        "path",
        "inference ms",
        "forward ms",
        "fwd + bwd ms",
        "peak MiB",
        "chain alone: fwd, both ms",
    ]
    columns += ["over chain's floor: fwd, both", "error: o, worst gradient", "compiled / this: fwd, both"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for r in found:
        cells = [str(r["L"]), r["path"], *(f"{r[n]:.3f}" for n in ("inference", "forward", "both"))]
        chain, floor, peer = r.get("chain"), floor_ms(r["L"]), base.get(("compiled", r["L"]))
        cells += [f"{r['peak_mib']:.0f}", f"{chain['forward']:.3f}, {chain['both']:.3f}" if chain else "-"]
        over = (
            (chain["forward"] / floor["chain_forward"], chain["both"] / floor["chain_both"]) if chain else ()
        )
        cells.append(", ".join(f"{o:.2f}" for o in over) or "-")
        cells.append(f"{r['errors']['o']:.1e}, {max(e for n, e in r['errors'].items() if n != 'o'):.1e}")
        cells.append(f"{peer['forward'] / r['forward']:.2f}, {peer['both'] / r['both']:.2f}" if peer else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["eager", "compiled", "operator"]
    parser.add_argument("--paths", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", nargs="+", type=int, default=list(STEPS), help="refinement steps L")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/refinement_h200.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    _operator.choose = lambda *_: chunkwise  # the long path is under test, whatever `choose` would take
    args.out.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "device": torch.cuda.get_device_name(),
        "versions": {p: version(p) for p in ("torch", "triton")},
        "dtype": "bfloat16",
        "shape": SHAPE,
        "unit": "ms, median of do_bench",
        "floor_ms": {L: floor_ms(L) for L in STEPS},
    }
    found = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    for row in rows(args.paths, args.steps):
        found = [r for r in found if (r["path"], r["L"]) != (row["path"], row["L"])] + [row]
        # After every row: a run that is stopped half-way keeps what it has measured.
        args.out.write_text(json.dumps({**document, "rows": found}, indent=1) + "\n")
    found.sort(key=lambda r: r["L"])
    print(table(found))
    for row in found:
        times = ", ".join(f"{n[:40]} {t:.0f}" for n, t in row.get("kernel_us", {}).items())
        print(f"L = {row['L']}, {row['path']}, microseconds: {times}")


if __name__ == "__main__":
    main()
