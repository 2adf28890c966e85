"""Speed and error of the scan on one GPU, beside other public kernels on the same inputs.

    PYTHONPATH=. python benchmarks/bench_scan.py                 # our kernels alone
    PYTHONPATH=. python benchmarks/bench_scan.py --peers DIR     # DIR holds fla, tilelang, flash_qla ...
    PYTHONPATH=. python benchmarks/bench_scan.py --parts choice  # where `choose` draws its borders
    PYTHONPATH=. python benchmarks/bench_scan.py --tiny          # many short sequences: bench_scan_tiny.py

Every part runs in a process of its own, correctness before timing: relative error |x - r| / |r| of the
output and of the gradients against `chunked` in float64, on inputs rounded to bfloat16 first and with NaN in
memory not yet written. Times are medians of triton.testing.do_bench, in milliseconds; a forward pass is timed
with gradients required, so that it keeps what the backward pass needs, except where the row says `inference`.
All parts compile at the same time; then each is timed while the others wait (`_turns.py`). fla tunes itself,
in its turn, in a quarter of Triton's time for it; it hands its work to flash-qla where that can be imported:
the processes that time fla cannot see it.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import io
import json
import os
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from _turns import Part, get_ready, report, wait_for_turn, with_kept
from bench_scan_tiny import tune_quickly, version
from torch import Tensor

SHAPES = {
    "4x4096x16x128": (4, 4096, 16, 128),
    "8x2048x32x64": (8, 2048, 32, 64),
    "1x32768x16x128": (1, 32768, 16, 128),
    "8x1024x8x64": (8, 1024, 8, 64),
}
FIRST = "4x4096x16x128"
# 128 K tokens, H = 16, D = 128: does the time depend on how they are cut into sequences?
LENGTHS = {f"{2**17 // T}x{T}x16x128": (2**17 // T, T, 16, 128) for T in (2048, 8192, 32768, 65536)}
# Sequences of one head, on both sides of the borders that `choose` draws between implementations.
BORDERS = {
    f"{pairs}x{T}x1x{D}": (pairs, T, 1, D)
    for D, lengths in ((16, (1024, 4096)), (32, (1024, 4096)), (64, (128, 256, 512)), (128, (128, 256, 512)))
    for T in lengths
    for pairs in (16, 128, 256, 1024)
}
COPY = (
    4.27e12  # bytes/s of a device-to-device copy on the H200, read plus written: what floors are counted with
)
NAMES = ("q", "k", "v", "log_decay", "beta", "write_k", "write_v")
Inputs = dict[str, Tensor]
Scan = Callable[..., Tensor]

ALL = {**SHAPES, **LENGTHS, **BORDERS}
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
    grads = torch.autograd.grad(o, list(exact.values()), do.double())
    reference = dict(zip(("o", *x), (o.detach(), *grads), strict=True))
    leaves = {n: a.clone().requires_grad_() for n, a in x.items()}
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    o = scan(**leaves)
    found = dict(
        zip(("o", *x), (o.detach(), *torch.autograd.grad(o, list(leaves.values()), do)), strict=True)
    )
    torch.use_deterministic_algorithms(False)
    return {n: float((found[n].double() - r).norm() / r.norm()) for n, r in reference.items()}


def measure(scan: Scan, x: Inputs) -> dict[str, float]:
    """Milliseconds of `scan` on x, and the memory that a forward and backward pass takes beyond x."""
    median = {"return_mode": "median", "warmup": 10, "rep": 60}
    with torch.no_grad():
        inference = triton.testing.do_bench(lambda: scan(**x), **median)
    leaves = {n: a.requires_grad_() for n, a in x.items()}
    do = torch.randn_like(scan(**leaves))

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


def kernel_times(scan: Scan, x: Inputs) -> dict[str, Any]:
    """GPU time alone, without the host's gaps between launches: milliseconds of the kernels of a forward pass
    (`gpu_forward`) and of both (`gpu_both`), and in `kernel_us` the median of each of our kernels over six
    passes, in order of launch."""
    leaves = {n: a.requires_grad_() for n, a in x.items()}
    do = torch.randn_like(scan(**leaves))

    def both() -> None:
        torch.autograd.grad(scan(**leaves), list(leaves.values()), do)

    found: dict[str, Any] = {}
    for name, run in (("gpu_forward", lambda: scan(**leaves)), ("gpu_both", both)):
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as trace:
            for _ in range(6):
                run()
            torch.cuda.synchronize()
        events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        found[name] = sum(e.device_time for e in events) / 6e3
    times: dict[str, list[float]] = {}
    for event in events:
        if event.name.endswith("_kernel"):
            times.setdefault(event.name.removesuffix("_kernel"), []).append(event.device_time)
    return found | {"kernel_us": {name: sorted(t)[len(t) // 2] for name, t in times.items()}}


def ours(name: str = "chunkwise") -> Scan:
    from prism.scan.triton import _operator

    # The implementation under test, whatever `choose` would take.
    _operator.choose = lambda *_: getattr(_operator, name)
    from prism import prism_scan

    return lambda **x: prism_scan(**x, backend="triton", validate=False)[0]


def without_flash_qla() -> None:
    sys.modules["flash_qla"] = None  # type: ignore[assignment]
    tune_quickly()


def fla() -> Scan:
    without_flash_qla()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda q, k, v, log_decay, beta: chunk_gated_delta_rule(q, k, v, log_decay, beta)[0]


def interleaved(*x: Tensor) -> Tensor:
    """[B, T, H, ...] of each sub-token as [B, T * len(x), H, ...]."""
    return torch.stack(x, 2).flatten(1, 2)


def subtokens(q, k, v, log_decay, beta, write_k, write_v) -> Inputs:  # type: ignore[no-untyped-def]
    """L writes as a diagonal-plus-low-rank rule on L + 1 sub-tokens a token: the first decays, erases and
    writes beta v k^T, its erasing vector reading the state before the decay; the others write; the last is
    read."""
    first, rest = [k], list(write_k.unbind(3))
    zero = torch.zeros_like(k)
    none = [zero] * len(rest)
    decay = log_decay[..., None].expand_as(k).float()
    erase = -(log_decay.exp() * beta)[..., None] * k
    return {
        "q": interleaved(*none, q),
        "k": interleaved(*first, *rest),
        "v": interleaved((beta[..., None] * v).to(v.dtype), *write_v.unbind(3)),
        "a": interleaved(erase.to(k.dtype), *none),
        "b": interleaved(k, *none),
        "gk": interleaved(decay, *[zero.float()] * len(rest)),
    }


def fla_dplr() -> Scan:
    without_flash_qla()
    from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule

    def scan(gk: Tensor, **x: Tensor) -> Tensor:
        return chunk_dplr_delta_rule(**x, gk=gk)[0]

    return scan


def householders(q, k, v, log_decay, beta, write_k, write_v) -> Inputs:  # type: ignore[no-untyped-def]
    """As many erasing writes a token as L writes and the base write; not the same function."""
    steps = write_k.shape[3] + 1
    return {
        "q": q,
        "k": interleaved(k, *write_k.unbind(3)),
        "v": interleaved(v, *write_v.unbind(3)),
        "g": log_decay,
        "beta": interleaved(*[beta] * steps),
    }


def fla_product() -> Scan:
    without_flash_qla()
    from fla.ops.gated_delta_product import chunk_gated_delta_product

    def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        steps = k.shape[1] // q.shape[1]
        return chunk_gated_delta_product(q, k, v, g, beta, num_householder=steps)[0]

    return scan


def flash_qla() -> Scan:
    from flash_qla import chunk_gated_delta_rule

    return lambda q, k, v, log_decay, beta: chunk_gated_delta_rule(q, k, v, log_decay, beta)[0]


def sdpa() -> Scan:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attend


class Kind(NamedTuple):
    make: Callable[[], Scan]
    shapes: dict[str, tuple[int, int, int, int]]
    writes: tuple[int, ...]
    convert: Callable[..., Inputs] | None = None  # to what the kernel takes, outside of what is timed
    same: bool = True  # it computes the same function
    tunes: bool = False  # it tunes itself in its first call: in its own turn, then


def only(*names: str) -> dict[str, tuple[int, int, int, int]]:
    return {n: SHAPES[n] for n in names}


PARTS = {
    "prism": Kind(ours, {**SHAPES, **LENGTHS}, (0, 2)),
    "choice": Kind(ours, BORDERS, (0,)),
    "fla": Kind(fla, SHAPES, (0,), tunes=True),
    "fla product": Kind(fla_product, only(FIRST), (2,), householders, same=False, tunes=True),
    "fla DPLR": Kind(fla_dplr, only(FIRST), (2,), subtokens, tunes=True),
    "flash-qla": Kind(flash_qla, only(FIRST, "1x32768x16x128"), (0,)),
    "sdpa": Kind(
        sdpa, only(FIRST), (0,), lambda q, k, v, log_decay, beta: {"q": q, "k": k, "v": v}, same=False
    ),
}


def attempts(
    name: str, shapes: list[str] | None
) -> Iterator[tuple[Kind, str, tuple[int, int, int, int], int]]:
    kind = PARTS[name]
    for shape_name, shape in kind.shapes.items():
        if shapes is None or shape_name in shapes:
            for L in kind.writes:
                yield kind, shape_name, shape, L


def whole(kind: Kind, scan: Scan) -> Scan:
    """`scan` of our inputs, of the last sub-token of each token."""

    def run(**x: Tensor) -> Tensor:
        o = scan(**(x if kind.convert is None else kind.convert(**x)))
        steps = o.shape[1] // x["v"].shape[1]
        return o[:, steps - 1 :: steps]

    return run


def run_part(name: str, shapes: list[str] | None) -> None:
    """Reports a row at a time: a part that is stopped half-way keeps what it has measured."""
    if name == "choice":
        wait_for_turn()
        for _, shape_name, shape, L in attempts(name, shapes):
            for implementation in ("resident", "chunkwise"):
                times = measure(ours(implementation), inputs(shape, L))
                report({"kernel": implementation, "shape": shape_name, "L": L, **times})
        return
    kind = PARTS[name]
    scan = kind.make()
    checked: dict[tuple[str, int], dict[str, Any]] = {}

    def check(shape_name: str, shape: tuple[int, int, int, int], L: int) -> None:
        row = checked[shape_name, L] = {"kernel": name, "shape": shape_name, "L": L}
        try:
            if kind.same:
                row["errors"] = errors(whole(kind, scan), shape, L)
        except Exception as failure:  # a peer that refuses a shape is a result, and is reported as one
            row["failed"] = f"{type(failure).__name__}: {failure}"[:300]
            if name == "prism":
                raise
        torch.cuda.empty_cache()

    if not kind.tunes:
        for _, *what in attempts(name, shapes):
            check(*what)
    wait_for_turn()
    for _, shape_name, shape, L in attempts(name, shapes):
        if kind.tunes:
            check(shape_name, shape, L)
        row = checked[shape_name, L]
        if "failed" not in row:
            try:
                x = inputs(shape, L)
                x = x if kind.convert is None else kind.convert(**x)
                row |= measure(scan, x)
                row |= kernel_times(scan, x)
                if name != "prism":
                    del row["kernel_us"]
            except Exception as failure:
                row["failed"] = f"{type(failure).__name__}: {failure}"[:300]
                if name == "prism":
                    raise
        report(row)
        torch.cuda.empty_cache()


def table(rows: list[dict[str, Any]]) -> str:
    """Rows in order, with ratios to the peers' L = 0 on the same shape: above 1, ours is faster."""
    base = {(r["kernel"], r["shape"]): r for r in rows if "both" in r and r["L"] == 0}
    columns = [
        *(
            "B, T, H, D",
            "kernel",
            "L",
            "inference ms",
            "forward ms",
            "fwd + bwd ms",
            "kernels alone: fwd, both",
        ),
        "over floor: fwd, both",
        *("peak MiB", "error: o, worst gradient", "fla / this: fwd, both", "flash-qla / this: fwd, both"),
    ]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for r in rows:
        shape = ALL[r["shape"]]
        cells = [", ".join(map(str, shape)), r["kernel"], str(r["L"])]
        if "both" not in r:
            cells.append(r.get("failed", "not timed").replace("|", "/"))
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
        alone = (f"{r[n]:.3f}" for n in ("gpu_forward", "gpu_both") if n in r)
        times.append(", ".join(alone) or "-")
        over = f"{r['forward'] / floors[0]:.1f}, {r['both'] / floors[1]:.1f}"
        lines.append("| " + " | ".join([*cells, *times, over, f"{r['peak_mib']:.0f}", error, *ratios]) + " |")
    return "\n".join(lines)


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Each target that the rows allow to judge; ratios above 1 say that ours is better."""
    at = {(r["kernel"], r["shape"], r["L"]): r for r in rows if "both" in r}
    found: list[tuple[str, float, float, float]] = []

    def judge(what: str, peer: tuple[str, str, int], L: int, column: str, must: float, aim: float) -> None:
        mine = at.get(("prism", peer[1], L))
        if mine and peer in at:
            found.append((f"{what}, {peer[1]}", at[peer][column] / mine[column], must, aim))

    for shape in SHAPES:
        judge("L = 0 forward against fla", ("fla", shape, 0), 0, "forward", 1, 1.5)
        judge("L = 0 both against fla", ("fla", shape, 0), 0, "both", 1.5, 2.5)
        judge("L = 2 both against fla's L = 0", ("fla", shape, 0), 2, "both", 1, 1.5)
        judge("L = 0 peak memory against fla", ("fla", shape, 0), 0, "peak_mib", 1, 1 / 0.7)
    judge("L = 0 both against flash-qla", ("flash-qla", FIRST, 0), 0, "both", 0.5, 1)
    judge("L = 2 both against flash-qla's L = 0", ("flash-qla", FIRST, 0), 2, "both", 1 / 4, 1 / 2.1)
    judge("L = 2 both against fla's DPLR", ("fla DPLR", FIRST, 2), 2, "both", 6, 12)
    judge("L = 2 both against fla's three products", ("fla product", FIRST, 2), 2, "both", 1.5, 3)
    if ("prism", FIRST, 0) in at:
        over = at["prism", FIRST, 0]["forward"] / floor_ms(SHAPES[FIRST], 0)[0]
        found.append((f"floor by bytes over L = 0 forward, {FIRST}", 1 / over, 1 / 5, 1 / 2.5))
    for L in (0, 2):
        times = [at["prism", shape, L]["both"] for shape in LENGTHS if ("prism", shape, L) in at]
        if len(times) == len(LENGTHS):
            spread = min(times) / max(times)
            found.append((f"L = {L} both, shortest over longest of T = 2K to 64K", spread, 1 / 1.25, 1 / 1.1))
    return [
        f"{what}: {ratio:.2f} "
        f"({'aim reached' if ratio >= aim else 'must reached' if ratio >= must else 'BELOW the must'}; "
        f"must {must:.2f}, aim {aim:.2f})"
        for what, ratio, must, aim in found
    ]


def code() -> str:
    """What identifies the kernels that were timed: their code, without comments and docstrings."""
    import prism.scan.triton

    return code_of(Path(prism.scan.triton.__file__).parent)


def code_of(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        source = file.read_text()
        lines = source.splitlines()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
        for node in ast.walk(ast.parse(source)):
            # A docstring; not by ast.dump or ast.unparse, which differ between versions of Python.
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
        digest.update("\n".join(line.rstrip() for line in lines if line.strip()).encode())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", type=Path, help="folder with the peers' packages, on the path of their parts only"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: prism, and all with --peers")
    parser.add_argument("--shapes", nargs="+", choices=ALL, help="default: all of a part")
    parser.add_argument("--seconds", type=float, default=300, help="for all parts to compile")
    parser.add_argument("--turn", type=float, default=300, help="seconds for one part to be timed")
    parser.add_argument("--wait-for", type=Path, help="time nothing before this file exists")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/scan_h200.json"))
    parser.add_argument("--keep", type=Path, help="earlier results of the same code, for what is not run now")
    parser.add_argument("--tiny", action="store_true", help="many short sequences instead")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    if "--tiny" in sys.argv[1:]:  # its own options, some of which have the names of ours
        rest = [word for word in sys.argv[1:] if word != "--tiny"]
        raise SystemExit(
            subprocess.call([sys.executable, str(Path(__file__).with_name("bench_scan_tiny.py")), *rest])
        )
    args = parser.parse_args()
    if args.part:
        run_part(args.part, args.shapes)
        return
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    kept: list[dict[str, Any]] = []
    if args.keep:
        earlier = json.loads(args.keep.read_text())
        if earlier["code"] != code():
            parser.error(f"--keep: expected results of the code {code()}, came those of {earlier['code']}")
        kept = earlier["rows"]
    started = []
    for name in args.parts or (list(PARTS) if args.peers else ["prism"]):
        env = dict(os.environ)
        if args.peers and name.startswith("fla"):
            env["PYTHONPATH"] = os.pathsep.join([env.get("PYTHONPATH", "."), str(args.peers.resolve())])
        command = [sys.executable, __file__, "--part", name]
        started.append(Part(name, command + (["--shapes", *args.shapes] if args.shapes else []), env))
    rows: list[dict[str, Any]] = []
    if args.peers:
        sys.path.append(str(args.peers))
    packages = ("torch", "triton", "flash-linear-attention", "fla-core", "tilelang", "flash-qla")
    document = {
        "device": torch.cuda.get_device_name(),
        "versions": {p: version(p) for p in packages},
        "code": code(),
        "dtype": "bfloat16",
        "unit": "ms, median of do_bench",
        "floor_bytes_per_second": COPY,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    get_ready(started, args.seconds, args.wait_for)
    for part in started:
        rows += part.rows(args.turn)
        done = {(r["kernel"], r["shape"], r["L"]) for r in rows}
        for _, shape, _, L in attempts(part.name, args.shapes):
            if part.name != "choice" and (part.name, shape, L) not in done:
                failed = "no result within the time given"
                rows.append({"kernel": part.name, "shape": shape, "L": L, "failed": failed})
                done.add((part.name, shape, L))
        # Written after every turn: what ends this process leaves what was measured.
        merged = with_kept(kept, rows, ("kernel", "shape", "L"), "both")
        args.out.write_text(json.dumps(document | {"rows": merged}, indent=1) + "\n")
    rows = merged
    print(table(rows), *verdicts(rows), sep="\n")
    for row in rows:
        if "kernel_us" in row:
            times = ", ".join(f"{n} {t:.0f}" for n, t in row["kernel_us"].items())
            print(f"{row['shape']} L = {row['L']}, microseconds: {times}")


if __name__ == "__main__":
    main()
