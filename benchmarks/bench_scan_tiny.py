"""Many short sequences: forward and backward of the scan on one GPU, beside compiled `chunked` and fla.

    PYTHONPATH=. python benchmarks/bench_scan_tiny.py                 # our kernels and `chunked`
    PYTHONPATH=. python benchmarks/bench_scan_tiny.py --peers DIR     # DIR holds fla and tilelang

T = 128 tokens, one head, 512 and 4096 sequences, widths 16 and 32, L = 0 and 2: an ensemble's scan. Each
kernel runs in a process of its own; relative errors |x - r| / |r| against the definition in float64, on
the same rounded inputs, come before times. Times are microseconds of one forward and one backward pass:
`eager` is the host's clock around both and a synchronisation, `graph` a replay of both from a CUDA graph;
medians. fla has no float32 kernel: its rows and ours beside them are bfloat16, L = 0.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

T = 128
SHAPES = [(B, D) for D in (16, 32) for B in (512, 4096)]
NAMES = ("q", "k", "v", "log_decay", "beta", "write_k", "write_v")
# part: dtype and numbers of writes
PARTS = {
    "prism float32": (torch.float32, (0, 2)),
    "chunked float32": (torch.float32, (0, 2)),
    "prism bfloat16": (torch.bfloat16, (0, 2)),
    "fla bfloat16": (torch.bfloat16, (0,)),
}
Scan = Callable[..., Tensor]

NEEDS_GPU = True


def inputs(B: int, D: int, L: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=g)

    def unit(*size: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*size), dim=-1).to(dtype)

    x = {"q": unit(B, T, 1, D), "k": unit(B, T, 1, D), "v": normal(B, T, 1, D).to(dtype)}
    x["log_decay"] = torch.nn.functional.logsigmoid(normal(B, T, 1) + 3)
    x["beta"] = normal(B, T, 1).sigmoid()
    if L:
        x["write_k"] = unit(B, T, 1, L, D)
        x["write_v"] = normal(B, T, 1, L, D).to(dtype)
    return x


def make(part: str) -> Scan:
    if part.startswith("fla"):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return lambda q, k, v, log_decay, beta: chunk_gated_delta_rule(q, k, v, log_decay, beta)[0]
    from prism import prism_scan

    backend = "triton" if part.startswith("prism") else "chunked"

    def scan(**x: Tensor) -> Tensor:
        return prism_scan(**x, backend=backend, validate=False)[0]

    return scan if backend == "triton" else torch.compile(scan, dynamic=False)


def both(scan: Scan, x: dict[str, Tensor], do: Tensor) -> tuple[Tensor, ...]:
    o = scan(**x)
    return o, *torch.autograd.grad(o, list(x.values()), do)


def errors(scan: Scan, D: int, L: int, dtype: torch.dtype) -> dict[str, float]:
    from prism import prism_scan

    x = {n: a.requires_grad_() for n, a in inputs(8, D, L, dtype, seed=1).items()}
    exact = {n: a.detach().double().requires_grad_() for n, a in x.items()}
    do = torch.randn_like(x["v"])
    want = both(lambda **y: prism_scan(**y, backend="recurrent")[0], exact, do.double())
    found = [a.detach() for a in both(scan, x, do)]
    return {
        n: float((f.double() - w.detach()).norm() / w.detach().norm())
        for n, f, w in zip(("o", *x), found, want, strict=True)
    }


def eager(run: Callable[[], object], n: int = 30) -> float:
    times = []
    for _ in range(n):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e6 * sorted(times)[n // 2]


def replayed(run: Callable[[], object], n: int = 30, repeats: int = 4) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    times = []
    for _ in range(n):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return 1e3 * sorted(times)[n // 2]


def measure(part: str, shapes: list[tuple[int, int]], writes: list[int]) -> Iterator[dict[str, object]]:
    dtype, counts = PARTS[part]
    scan = make(part)
    for B, D in shapes:
        for L in [L for L in counts if L in writes]:
            row: dict[str, object] = {"kernel": part, "sequences": B, "D": D, "L": L}
            try:
                x = {n: a.requires_grad_() for n, a in inputs(B, D, L, dtype).items()}
                do = torch.randn_like(x["v"])
                start = time.perf_counter()
                both(scan, x, do)
                torch.cuda.synchronize()
                row["first_call_s"] = time.perf_counter() - start
                row["errors"] = errors(scan, D, L, dtype)
                row["eager_us"] = eager(lambda x=x, do=do: both(scan, x, do))  # type: ignore[misc]
                row["graph_us"] = replayed(lambda x=x, do=do: both(scan, x, do))  # type: ignore[misc]
            except Exception as failure:  # what a peer refuses is a result too
                if part.startswith("prism"):
                    raise
                row["failed"] = f"{type(failure).__name__}: {failure}"[:300]
            yield row


def table(rows: list[dict]) -> str:
    """Ratios above 1: ours is faster than the row's rival."""
    found = {(r["kernel"], r["sequences"], r["D"], r["L"]): r for r in rows if "graph_us" in r}
    lines = [
        "| sequences, D, L | kernel | eager us | graph us | error: o, worst gradient | over ours |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        key = (r["sequences"], r["D"], r["L"])
        cells = [", ".join(map(str, key)), r["kernel"]]
        if "failed" in r:
            lines.append("| " + " | ".join([*cells, r["failed"], "", "", ""]) + " |")
            continue
        ours = found.get(("prism " + r["kernel"].split()[1], *key))
        rival = ours is not None and not r["kernel"].startswith("prism")
        ratio = (
            f"{r['eager_us'] / ours['eager_us']:.1f}, {r['graph_us'] / ours['graph_us']:.1f}" if rival else ""
        )
        worst = max(e for n, e in r["errors"].items() if n != "o")
        cells += [
            f"{r['eager_us']:.0f}",
            f"{r['graph_us']:.0f}",
            f"{r['errors']['o']:.1e}, {worst:.1e}",
            ratio,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="folder with fla, on the path of its own part only")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all, fla only with --peers")
    parser.add_argument("--sequences", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 32])
    parser.add_argument("--writes", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--seconds", type=int, default=200, help="limit of one part")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scan_tiny_h200.json"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = [(B, D) for B, D in SHAPES if B in args.sequences and D in args.widths]
    if args.part:
        for row in measure(args.part, shapes, args.writes):
            print("ROW " + json.dumps(row), flush=True)
        return
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    rows = []
    for part in args.parts or [p for p in PARTS if args.peers or not p.startswith("fla")]:
        env = dict(os.environ)
        if args.peers and part.startswith("fla"):
            env["PYTHONPATH"] = os.pathsep.join([env.get("PYTHONPATH", "."), str(args.peers.resolve())])
        command = [sys.executable, __file__, "--part", part]
        for name in ("sequences", "widths", "writes"):
            command += [f"--{name}", *map(str, getattr(args, name))]
        try:
            done = subprocess.run(command, env=env, timeout=args.seconds, stdout=subprocess.PIPE, text=True)
            output = done.stdout
            if done.returncode:
                print(f"{part} ended with exit code {done.returncode}")
        except subprocess.TimeoutExpired as stopped:
            print(f"{part} was stopped after {args.seconds} s")
            output = stopped.stdout.decode() if isinstance(stopped.stdout, bytes) else stopped.stdout or ""
        rows += [json.loads(line[4:]) for line in output.splitlines() if line.startswith("ROW ")]
    if args.peers:
        sys.path.append(str(args.peers))
    document = {
        "device": torch.cuda.get_device_name(),
        "versions": {p: version(p) for p in ("torch", "triton", "flash-linear-attention", "tilelang")},
        "tokens": T,
        "unit": "microseconds of one forward and backward pass, median",
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
