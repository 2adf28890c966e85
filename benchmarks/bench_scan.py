"""Speed and error of the scan on one GPU, beside other public kernels on the same inputs.

    PYTHONPATH=. python benchmarks/bench_scan.py                 # our kernels alone
    PYTHONPATH=. python benchmarks/bench_scan.py --peers DIR     # DIR holds fla, tilelang, flash_qla ...
    PYTHONPATH=. python benchmarks/bench_scan.py --tiny          # many short sequences: bench_scan_tiny.py

Every kernel runs in a process of its own, correctness before timing: relative error |x - r| / |r| of the
output and of the gradients against `chunked` in float64, on inputs rounded to bfloat16 first and with NaN in
memory not yet written. Times are medians of triton.testing.do_bench, in milliseconds; a forward pass is timed
with gradients required, so that it keeps what the backward pass needs, except where the row says `inference`.
fla hands its work to flash-qla where that can be imported: the process that times fla cannot see it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

SHAPES = {
    "4x4096x16x128": (4, 4096, 16, 128),
    "8x2048x32x64": (8, 2048, 32, 64),
    "1x32768x16x128": (1, 32768, 16, 128),
    "8x1024x8x64": (8, 1024, 8, 64),
}
FIRST = "4x4096x16x128"
# 128 K tokens, H = 16, D = 128: does the time depend on how they are cut into sequences?
LENGTHS = {f"{2**17 // T}x{T}x16x128": (2**17 // T, T, 16, 128) for T in (2048, 8192, 65536)}
COPY = (
    4.27e12  # bytes/s of a device-to-device copy on the H200, read plus written: what floors are counted with
)
NAMES = ("q", "k", "v", "log_decay", "beta", "write_k", "write_v")
Inputs = dict[str, Tensor]
Scan = Callable[..., Tensor]

NEEDS_GPU = True


def inputs(shape: tuple[int, int, int, int], L: int, seed: int = 0) -> Inputs:
    """Unit q and k, log_decay around -0.05, beta in (0, 1): what a trained layer hands to the scan."""
    B, T, H, D = shape
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=g)

    def unit(*size: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*size), dim=-1).bfloat16()

    x = {"q": unit(B, T, H, D), "k": unit(B, T, H, D), "v": normal(B, T, H, D).bfloat16()}
    x["log_decay"] = torch.nn.functional.logsigmoid(normal(B, T, H) + 3)
    x["beta"] = normal(B, T, H).sigmoid()
    if L:
        x["write_k"] = unit(B, T, H, L, D)
        x["write_v"] = normal(B, T, H, L, D).bfloat16()
    return x


def floor_ms(shape: tuple[int, int, int, int], L: int) -> tuple[float, float]:
    """Milliseconds to move every input and output once: forward, forward and backward."""
    B, T, H, D = shape
    wide, narrow = 2 * B * T * H * D, 4 * B * T * H
    forward = (4 + 2 * L) * wide + 2 * narrow
    # Backward reads the inputs and do, and writes a gradient for each input.
    both = forward + (4 + 2 * L) * wide + 2 * narrow + (3 + 2 * L) * wide + 2 * narrow
    return 1e3 * forward / COPY, 1e3 * both / COPY


def errors(scan: Scan, shape: tuple[int, int, int, int], L: int) -> dict[str, float]:
    """Relative errors of o and of every gradient; at most four sequences of two heads, the reference in
    float64."""
    from prism.scan.chunked import chunked

    B, T, _, D = shape
    x = inputs((min(B, 4), T, 2, D), L, seed=1)
    do = torch.randn_like(x["v"])
    exact = {n: a.double().requires_grad_() for n, a in x.items()}
    o, _ = chunked(*(exact.get(n) for n in NAMES), D**-0.5, None, None)
    reference = dict(
        zip(("o", *x), (o, *torch.autograd.grad(o, list(exact.values()), do.double())), strict=True)
    )
    leaves = {n: a.clone().requires_grad_() for n, a in x.items()}
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    o = scan(**leaves)
    found = dict(zip(("o", *x), (o, *torch.autograd.grad(o, list(leaves.values()), do)), strict=True))
    torch.use_deterministic_algorithms(False)
    return {n: float((found[n].double() - r).norm() / r.norm()) for n, r in reference.items()}


def measure(scan: Scan, shape: tuple[int, int, int, int], L: int) -> dict[str, float]:
    x = inputs(shape, L)
    do = torch.randn_like(x["v"])
    median = {"return_mode": "median", "warmup": 10, "rep": 60}
    with torch.no_grad():
        inference = triton.testing.do_bench(lambda: scan(**x), **median)
    leaves = {n: a.requires_grad_() for n, a in x.items()}

    def both() -> None:
        torch.autograd.grad(scan(**leaves), list(leaves.values()), do)

    forward = triton.testing.do_bench(lambda: scan(**leaves), **median)
    total = triton.testing.do_bench(both, **median)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"inference": inference, "forward": forward, "both": total, "peak_mib": peak}


def kernel_times(scan: Scan, shape: tuple[int, int, int, int], L: int) -> dict[str, float]:
    """Median microseconds of each of our kernels over six forward and backward passes, in order of launch."""
    x = inputs(shape, L)
    do = torch.randn_like(x["v"])
    leaves = {n: a.requires_grad_() for n, a in x.items()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(6):
            torch.autograd.grad(scan(**leaves), list(leaves.values()), do)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in trace.events():
        if event.name.endswith("_kernel"):
            times.setdefault(event.name.removesuffix("_kernel"), []).append(event.device_time)
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def ours() -> Scan:
    from prism.scan.triton import _operator, chunkwise

    # The long path is under test, whatever `choose` would take.
    _operator.choose = lambda *_: chunkwise
    from prism import prism_scan

    return lambda **x: prism_scan(**x, backend="triton", validate=False)[0]


def fla() -> Scan:
    sys.modules["flash_qla"] = None  # type: ignore[assignment]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda q, k, v, log_decay, beta: chunk_gated_delta_rule(q, k, v, log_decay, beta)[0]


def flash_qla() -> Scan:
    from flash_qla import chunk_gated_delta_rule

    return lambda q, k, v, log_decay, beta: chunk_gated_delta_rule(q, k, v, log_decay, beta)[0]


def sdpa() -> Scan:
    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        zero = 0 * (
            log_decay.sum() + beta.sum()
        )  # softmax attention has neither: keeps their gradients defined
        return (
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2) + zero
        )

    return attend


# name: (implementation, shapes, write counts, whether it computes the same function)
PARTS: dict[str, tuple[Callable[[], Scan], tuple[str, ...], tuple[int, ...], bool]] = {
    "prism": (ours, (*SHAPES, *LENGTHS), (0, 2), True),
    "fla": (fla, tuple(SHAPES), (0,), True),
    "flash-qla": (flash_qla, (FIRST, "1x32768x16x128"), (0,), True),
    "sdpa": (sdpa, (FIRST,), (0,), False),
}


def run_part(name: str, shapes: list[str] | None, out: Path) -> None:
    """One JSON object a line: a part that is stopped half-way keeps what it has measured."""
    make, all_shapes, counts, same = PARTS[name]
    scan = make()
    for shape_name in all_shapes if shapes is None else [s for s in all_shapes if s in shapes]:
        shape = {**SHAPES, **LENGTHS}[shape_name]
        for L in counts:
            row: dict[str, object] = {"kernel": name, "shape": shape_name, "L": L}
            try:
                if same:
                    row["errors"] = errors(scan, shape, L)
                row.update(measure(scan, shape, L))
                if name == "prism":
                    row["kernel_us"] = kernel_times(scan, shape, L)
            except Exception as failure:  # a peer that refuses a shape is a result, and is reported as one
                row["failed"] = f"{type(failure).__name__}: {failure}"[:300]
                if name == "prism":
                    raise
            finally:
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            torch.cuda.empty_cache()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(rows: list[dict]) -> str:
    """Rows in order, with ratios to the peers' L = 0 on the same shape: above 1, ours is faster."""
    base = {(r["kernel"], r["shape"]): r for r in rows if "both" in r}
    columns = [
        *("B, T, H, D", "kernel", "L", "inference ms", "forward ms", "fwd + bwd ms", "over floor: fwd, both"),
        *("peak MiB", "error: o, worst gradient", "fla / this: fwd, both", "flash-qla / this: fwd, both"),
    ]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for r in rows:
        shape = {**SHAPES, **LENGTHS}[r["shape"]]
        cells = [", ".join(map(str, shape)), r["kernel"], str(r["L"])]
        if "failed" in r:
            cells.append(r["failed"].replace("|", "/"))
            lines.append("| " + " | ".join([*cells, *[""] * (len(columns) - len(cells))]) + " |")
            continue
        floors = floor_ms(shape, r["L"])
        found = r.get("errors")
        error = (
            "-" if found is None else f"{found['o']:.1e}, {max(e for n, e in found.items() if n != 'o'):.1e}"
        )
        ratios = []
        for peer in ("fla", "flash-qla"):
            p = base.get((peer, r["shape"]))
            # No peer keeps anything for backward beyond its forward: inference against forward would flatter.
            ratios.append(f"{p['forward'] / r['forward']:.2f}, {p['both'] / r['both']:.2f}" if p else "-")
        times = [f"{r[n]:.3f}" for n in ("inference", "forward", "both")]
        over = f"{r['forward'] / floors[0]:.1f}, {r['both'] / floors[1]:.1f}"
        lines.append("| " + " | ".join([*cells, *times, over, f"{r['peak_mib']:.0f}", error, *ratios]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", type=Path, help="folder with the peers' packages, on the path of their parts only"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: prism, and all with --peers")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, *LENGTHS], help="default: all of a part")
    parser.add_argument("--seconds", type=int, default=300, help="limit of one part")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scan_h200.json"))
    parser.add_argument("--tiny", action="store_true", help="many short sequences instead")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.tiny:
        raise SystemExit(
            subprocess.call([sys.executable, str(Path(__file__).with_name("bench_scan_tiny.py")), *rest])
        )
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if args.part:
        run_part(args.part, args.shapes, args.out)
        return
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    parts = args.parts or (list(PARTS) if args.peers else ["prism"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.with_suffix(".jsonl")
    lines.unlink(missing_ok=True)
    for part in parts:
        env = dict(os.environ)
        if args.peers and part not in ("prism", "sdpa"):
            env["PYTHONPATH"] = os.pathsep.join([env.get("PYTHONPATH", "."), str(args.peers.resolve())])
        command = [sys.executable, __file__, "--part", part, "--out", str(lines)]
        command += ["--shapes", *args.shapes] if args.shapes else []
        try:
            code = subprocess.run(command, env=env, timeout=args.seconds, check=False).returncode
            if code:
                print(f"part {part} ended with exit code {code}")
        except subprocess.TimeoutExpired:
            print(f"part {part} was stopped after {args.seconds} s")
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    lines.unlink(missing_ok=True)
    if args.peers:
        sys.path.append(str(args.peers))
    packages = ("torch", "triton", "flash-linear-attention", "fla-core", "tilelang", "flash-qla")
    versions = {p: version(p) for p in packages}
    document = {
        "device": torch.cuda.get_device_name(),
        "versions": versions,
        "dtype": "bfloat16",
        "unit": "ms, median of do_bench",
        "floor_bytes_per_second": COPY,
        "rows": rows,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))
    for row in rows:
        if "kernel_us" in row:
            times = ", ".join(f"{n} {t:.0f}" for n, t in row["kernel_us"].items())
            print(f"{row['shape']} L = {row['L']}, microseconds: {times}")


if __name__ == "__main__":
    main()
