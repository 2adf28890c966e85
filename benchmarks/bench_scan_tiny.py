"""Many short sequences: forward and backward of the scan on one GPU, beside compiled `chunked` and fla.

    PYTHONPATH=. python benchmarks/bench_scan_tiny.py                 # our kernels and `chunked`
    PYTHONPATH=. python benchmarks/bench_scan_tiny.py --peers DIR     # DIR holds fla and tilelang

T = 128 tokens, one head, 512 and 4096 sequences, widths 16 and 32, L = 0 and 2: an ensemble's scan. Relative
errors |x - r| / |r| of 8 of the sequences against the definition in float64, on the same rounded inputs, come
before times. Times are microseconds of one forward and one backward pass: `eager` is the host's clock around
both and a synchronisation, `graph` a replay of both from a CUDA graph; medians. `chunked` is compiled by
torch.compile, a whole graph a row, at several lengths of a chunk, which C in its name gives; the fastest of
them is the rival. fla has no float32 kernel: its rows and ours beside them are bfloat16, L = 0; its kernels
tune themselves in the first call, and a process for every core compiles its share of their variants before.

Each kernel runs in a process of its own. All compile at the same time; then each is timed while the others
wait.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _turns import Part, report, take_turns, wait_for_turn, with_kept
from torch import Tensor

T = 128
SHAPES = [(B, D) for D in (16, 32) for B in (512, 4096)]
CHUNKS = (16, 32, 64)
# part: dtype, numbers of writes, length of a chunk
PARTS: dict[str, tuple[torch.dtype, tuple[int, ...], int | None]] = {
    "prism float32": (torch.float32, (0, 2), None),
    **{f"chunked C={C} float32": (torch.float32, (0, 2), C) for C in CHUNKS},
    "prism bfloat16": (torch.bfloat16, (0, 2), None),
    "fla bfloat16": (torch.bfloat16, (0,), None),
}
TARGETS = {"chunked": (5, 15), "fla": (4, 12)}
CHECKED = 8
Scan = Callable[..., Tensor]
Inputs = dict[str, Tensor]

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
    x["do"] = normal(B, T, 1, D).to(dtype)
    return x


def make(part: str) -> Callable[[], Scan]:
    """What makes the scan of one row: compiled code is its own, so that no row ends another's limit."""
    chunk = PARTS[part][2]
    if part.startswith("fla"):
        # fla would hand its work to flash-qla where that can be imported.
        sys.modules["flash_qla"] = None  # type: ignore[assignment]
        tune_quickly()
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return lambda: lambda q, k, v, log_decay, beta: chunk_gated_delta_rule(q, k, v, log_decay, beta)[0]
    from prism import prism_scan

    backend = "triton" if chunk is None else "chunked"

    def scan(**x: Any) -> Tensor:
        return prism_scan(**x, backend=backend, validate=False)[0]

    if chunk is None:
        return lambda: scan
    import prism.scan.chunked

    prism.scan.chunked._chunk_length = lambda *_: chunk
    torch._dynamo.config.error_on_recompile = True

    def compiled() -> Scan:
        # Dynamo keeps what it compiled by code object.
        code = scan.__code__.replace(co_name=f"scan_{time.perf_counter_ns()}")
        own = types.FunctionType(code, scan.__globals__, None, None, scan.__closure__)
        return torch.compile(own, dynamic=False, fullgraph=True)

    return compiled


def both(scan: Scan, x: Inputs, do: Tensor) -> tuple[Tensor, ...]:
    o = scan(**x)
    return o, *torch.autograd.grad(o, list(x.values()), do)


def errors(found: tuple[Tensor, ...], x: Inputs, do: Tensor) -> dict[str, float]:
    """Of the first sequences."""
    from prism import prism_scan

    exact = {n: a.detach()[:CHECKED].double().requires_grad_() for n, a in x.items()}
    want = both(lambda **y: prism_scan(**y, backend="recurrent")[0], exact, do[:CHECKED].double())
    return {
        n: float((f[:CHECKED].double() - w).norm() / w.norm())
        for n, f, w in zip(("o", *x), found, (w.detach() for w in want), strict=True)
    }


def median(measure: Callable[[], float]) -> float:
    """Of 15 to 100 measurements, in seconds, after three: as many as take 0.15 s."""
    first = sorted(measure() for _ in range(3))[1]
    return statistics.median(measure() for _ in range(max(15, min(100, int(0.15 / first)))))


def eager(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def capture(run: Callable[[], object], repeats: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return graph


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def work(part: str, shapes: list[tuple[int, int]], writes: list[int], seconds: float) -> None:
    """A part's process: compiles all rows, and times them when it is told to."""
    dtype, counts, _ = PARTS[part]
    began, repeats, rows = time.perf_counter(), 4, []
    new = make(part)
    for B, D in shapes:
        for L in [L for L in counts if L in writes]:
            row: dict[str, Any] = {"kernel": part, "sequences": B, "D": D, "L": L}
            run = graph = None
            if time.perf_counter() - began > seconds:
                row["failed"] = f"its turn to compile did not come within {seconds:.0f} s"
            else:
                run, graph = prepare(new(), row, inputs(B, D, L, dtype), repeats)
            rows.append((row, run, graph))
    wait_for_turn()
    for row, run, graph in rows:
        if run is not None:
            row["eager_us"] = 1e6 * median(lambda run=run: eager(run))  # type: ignore[misc]
        if graph is not None:
            row["graph_us"] = 1e6 * median(lambda graph=graph: replayed(graph)) / repeats  # type: ignore[misc]
        report(row)


def prepare(scan: Scan, row: dict[str, Any], x: Inputs, repeats: int) -> tuple[Any, Any]:
    """What to time, and its graph; what a rival refuses is written in the row."""
    do = x.pop("do")
    x = {n: a.requires_grad_() for n, a in x.items()}
    start = time.perf_counter()

    def run() -> object:
        return both(scan, x, do)

    try:
        # Detached: a graph of autograd that stays alive ties its leaves to this stream, and captures fail.
        found = tuple(a.detach() for a in both(scan, x, do))
        torch.cuda.synchronize()
        row["first_call_s"] = time.perf_counter() - start
        row["errors"] = errors(found, x, do)
    except Exception as failure:
        if row["kernel"].startswith("prism"):
            raise
        row["failed"] = f"{type(failure).__name__}: {failure}"[:300]
        return None, None
    try:
        return run, capture(run, repeats)
    except Exception as failure:
        if row["kernel"].startswith("prism"):
            raise
        row["not_captured"] = f"{type(failure).__name__}: {failure}"[:300]
        return run, None


def tune_quickly() -> None:
    """25 ms a variant where Triton's autotuner takes 125: fla has some hundred of them at each width."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    whole = Autotuner.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        whole(self, *args, **named)
        self._do_bench = functools.partial(do_bench, warmup=5, rep=20)

    Autotuner.__init__ = init


def share(part: str, shapes: list[tuple[int, int]], number: int, of: int) -> None:
    """Compile one share of the variants among which fla's kernels choose, into Triton's cache."""
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.__init__

    def init(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **named: Any) -> None:
        configs = list(configs)
        whole(self, fn, arg_names, configs[number::of] or configs[:1], *rest, **named)

    Autotuner.__init__ = init
    scan, dtype = make(part)(), PARTS[part][0]
    for D in dict.fromkeys(D for _, D in shapes):
        x = inputs(CHECKED, D, 0, dtype)
        do = x.pop("do")
        both(scan, {n: a.requires_grad_() for n, a in x.items()}, do)
    torch.cuda.synchronize()


def rivals(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Our row of the same inputs, where `row` is a rival's."""
    same = ("sequences", "D", "L")
    name = "prism " + row["kernel"].split()[-1]
    ours = [r for r in rows if r["kernel"] == name and all(r[k] == row[k] for k in same)]
    return ours[0] if ours and not row["kernel"].startswith("prism") else None


def table(rows: list[dict[str, Any]]) -> str:
    """Every row, with how many times longer than ours it takes."""
    lines = [
        "| sequences, D, L | kernel | eager us | graph us | error: o, worst gradient | over ours |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [f"{r['sequences']}, {r['D']}, {r['L']}", r["kernel"]]
        if "eager_us" not in r:
            lines.append("| " + " | ".join([*cells, r.get("failed", "not timed"), "", "", ""]) + " |")
            continue
        ours, over = rivals(r, rows), []
        for name in ("eager_us", "graph_us"):
            cells.append(f"{r[name]:.0f}" if name in r else r.get("not_captured", ""))
            if ours is not None and name in r:
                over.append(f"{r[name] / ours[name]:.1f}")
        worst = max(e for n, e in r["errors"].items() if n != "o")
        cells += [f"{r['errors']['o']:.1e}, {worst:.1e}", ", ".join(over)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """For each rival and shape, the fastest of its rows over ours, beside the targets."""
    lines = []
    for rival, (must, aim) in TARGETS.items():
        for shape in dict.fromkeys((r["sequences"], r["D"], r["L"]) for r in rows):
            here = [
                r for r in rows if r["kernel"].startswith(rival) and (r["sequences"], r["D"], r["L"]) == shape
            ]
            for name in ("graph_us", "eager_us"):
                found = [
                    (r[name], r) for r in here if name in r and (ours := rivals(r, rows)) and name in ours
                ]
                if not found:
                    continue
                time_us, row = min(found, key=lambda pair: pair[0])
                ratio = time_us / rivals(row, rows)[name]  # type: ignore[index]
                said = (
                    "aim reached" if ratio >= aim else "must reached" if ratio >= must else "BELOW the must"
                )
                what = (
                    f"{shape[0]} x {shape[1]}, L = {shape[2]}, {name[:-3]}: {ratio:.1f} times {row['kernel']}"
                )
                lines.append(f"{what} ({said}; must {must}, aim {aim})")
    return lines


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
    parser.add_argument("--seconds", type=float, default=300, help="for all parts to compile")
    parser.add_argument("--shares", type=int, default=os.cpu_count(), help="processes that compile for fla")
    parser.add_argument("--wait-for", type=Path, help="time nothing before this file exists")
    parser.add_argument("--keep", type=Path, help="earlier results, for what is not run now")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scan_tiny_h200.json"))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = [(B, D) for B, D in SHAPES if B in args.sequences and D in args.widths]
    if args.share is not None:
        share(args.part, shapes, args.share, args.shares)
        return
    command = [sys.executable, __file__, "--shares", str(args.shares), "--seconds", str(args.seconds)]
    command += ["--sequences", *map(str, args.sequences)]
    if args.part:
        if args.part.startswith("fla"):
            shares = [
                subprocess.Popen(
                    [*command, "--widths", *map(str, args.widths), "--part", args.part, "--share", str(i)]
                )
                for i in range(args.shares)
            ]
            for process in shares:
                process.wait()
        work(args.part, shapes, args.writes, args.seconds)
        return
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    parts = []
    for part in args.parts or [p for p in PARTS if args.peers or not p.startswith("fla")]:
        env = dict(os.environ)
        if args.peers and part.startswith("fla"):
            env["PYTHONPATH"] = os.pathsep.join([env.get("PYTHONPATH", "."), str(args.peers.resolve())])
        units = [(args.widths, args.writes)]
        if part.startswith("chunked"):  # compiling takes long: a process for each, which compiles by itself
            units = [([D], [L]) for D in args.widths for L in args.writes]
            env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        for widths, writes in units:
            own = ["--widths", *map(str, widths), "--writes", *map(str, writes)]
            parts.append(Part(f"{part}, D {widths}, L {writes}", [*command, "--part", part, *own], env))
    if args.peers:
        sys.path.append(str(args.peers))
    document = {
        "device": torch.cuda.get_device_name(),
        "versions": {p: version(p) for p in ("torch", "triton", "flash-linear-attention", "tilelang")},
        "tokens": T,
        "unit": "microseconds of one forward and backward pass, median",
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)

    kept = json.loads(args.keep.read_text())["rows"] if args.keep else []

    def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return with_kept(kept, rows, ("kernel", "sequences", "D", "L"), "graph_us")

    def write(rows: list[dict[str, Any]]) -> None:
        found = merged(rows)
        own = sorted({r["kernel"] for r in found} - {r["kernel"] for r in rows}) if kept else []
        args.out.write_text(json.dumps(document | {"kept": own, "rows": found}, indent=1) + "\n")

    rows = merged(take_turns(parts, args.seconds, 30, args.wait_for, write))
    print(table(rows), *verdicts(rows), sep="\n")


if __name__ == "__main__":
    main()
