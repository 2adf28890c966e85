"""Training steps of whole language models of about 130 million parameters on one GPU, in tokens a second.

    PYTHONPATH=. python benchmarks/bench_model.py                 # our models alone
    PYTHONPATH=. python benchmarks/bench_model.py --peers DIR     # DIR holds fla and tilelang
    PYTHONPATH=. python benchmarks/bench_model.py --figure        # table and figure of what was measured

A step is forward, backward and AdamW (fused) on 16,384 random tokens, cut into sequences of T = 2,048 to
16,384: 12 layers, d = 768, 6 heads of width 128, GELU MLP, vocabulary 50,304 tied to the read-out (the shape
of GPT-2 small); float32 weights and residual stream under bfloat16 autocast.

Parameters: at L = 0 the MLP is 3,072 wide. Every refinement step brings matrices of its own, and the MLP is
narrowed by as many parameters, so that all totals agree within 0.3%: by 256 a step where W_kappa and W_p
have rank 128 (the arms "L = n"), by 768 where they are full ("L = n, full"). Matrix products then cost about
the same in every arm, and what differs is the scan and the refinement. "L = 2, full" has the matrices of the
preset `prism` and is the one to judge. The arm "fla" has fla's GatedDeltaNet
layer in the place of our mixer in the same skeleton: the parameters of our L = 0, one by one.

Modes: "eager"; "compiled": every block by torch.compile as one graph, and the loss; for fla "compiled" with
the graph breaks that its layer asks for, and "skeleton": only what is around its layer, which runs its own
fused kernels. Parts run in processes of their own: first all build, are checked and compile side by side,
then each is timed alone. The check, before any timing: gradients of one batch against those of the same
weights in float32 on the `chunked` backend, uncompiled. Times are medians of single steps by CUDA events: of
the whole step replayed from a CUDA graph, and launched by the host, which may be slower than the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism import PrismConfig, PrismMixer, PrismModel
from prism._hookpoints import HookPoints
from prism._init import Initializer
from prism.mixer import MIXERS, register

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _model_report import figure, table
from _turns import Part, report, take_turns, wait_for_turn, with_kept
from bench_scan_tiny import tune_quickly, version

NEEDS_GPU = True
TOKENS = 2**14
LENGTHS = (2048, 4096, 8192, 16384)
PROFILED = 4096
PEERS = ("torch", "triton", "flash-linear-attention", "fla-core", "tilelang")
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Size:
    """What all arms share; `hidden` is the MLP's width at L = 0."""

    vocab: int = 50304
    d: int = 768
    layers: int = 12
    heads: int = 6
    hidden: int = 3072
    rank: int = 128


FULL_SIZE = Size()


@dataclass(frozen=True)
class Arm:
    L: int
    full: bool = False
    mixer: str = "prism"
    modes: tuple[str, ...] = ("compiled",)

    def config(self, size: Size = FULL_SIZE, **changes: Any) -> PrismConfig:
        # W_kappa and W_p of a step have 2 d d parameters, or 4 d rank; a unit of the MLP has 2 d.
        hidden = size.hidden - self.L * (size.d if self.full else 2 * size.rank)
        fields: dict[str, Any] = {
            "vocab_size": size.vocab,
            "d_model": size.d,
            "n_layers": size.layers,
            "n_heads": size.heads,
            "n_refine": self.L,
            "refine_rank": size.rank if self.L and not self.full else None,
            "mlp_ratio": hidden / size.d,
            "tie_embeddings": True,
            "mixer": self.mixer,
        }
        return PrismConfig(**fields | changes)


ARMS = {
    "L = 0": Arm(0, modes=("compiled", "eager")),
    "L = 1": Arm(1),
    "L = 2": Arm(2, modes=("compiled", "eager")),
    "L = 4": Arm(4),
    "L = 1, full": Arm(1, full=True),
    "L = 2, full": Arm(2, full=True),
    "fla": Arm(0, mixer="fla", modes=("skeleton", "compiled", "eager")),
}


class FlaMixer(nn.Module):
    """fla's GatedDeltaNet layer with the weights that our L = 0 mixer would start from."""

    def __init__(self, config: PrismConfig) -> None:
        super().__init__()
        sys.modules["flash_qla"] = None  # type: ignore[assignment]  # else fla hands its scan on to it
        from fla.layers import GatedDeltaNet

        self.config = config
        self.layer = GatedDeltaNet(
            config.d_model, expand_v=config.expand_v, head_dim=config.key_dim, num_heads=config.n_heads
        )
        self.points = HookPoints()
        self.opaque = False
        """True: torch.compile leaves the layer alone."""

    def initialize(self, init: Initializer) -> None:
        from prism.convert import to_fla

        ours = PrismMixer(self.config.replace(mixer="prism"), seed=0)
        ours.initialize(init)
        self.layer.load_state_dict(to_fla(ours))

    def forward(self, x: Tensor, cache: None = None, use_cache: bool = False) -> Tensor:
        return _opaque(self.layer, x) if self.opaque else self.layer(x)[0]

    def state_size(self) -> tuple[int, int]:
        return PrismMixer(self.config.replace(mixer="prism"), seed=0).state_size()

    def point_shapes(self, B: int, T: int) -> dict[str, tuple[int, ...]]:
        return {}


@torch.compiler.disable
def _opaque(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0]


def build(arm: Arm, size: Size = FULL_SIZE, device: str = "cuda", **changes: Any) -> PrismModel:
    if arm.mixer == "fla" and "fla" not in MIXERS:
        register("fla")(FlaMixer)
    return PrismModel(arm.config(size, **changes), seed=0, device=device)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


Loss = Callable[[Tensor], Tensor]


def loss_of(model: PrismModel, mode: str) -> Loss:
    """tokens [B, T + 1] -> loss of the next token under bfloat16 autocast; `mode` as at the top."""
    entropy = cross_entropy
    for block in model.blocks:
        if mode != "eager":
            # One graph serves all layers; fla's layer asks for breaks in it.
            block.compile(fullgraph=model.config.mixer == "prism", dynamic=False)
        if isinstance(block.mixer, FlaMixer):
            block.mixer.opaque = mode == "skeleton"
    if mode != "eager":
        entropy = torch.compile(cross_entropy, fullgraph=True, dynamic=False)

    def loss(tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return entropy(model(tokens[:, :-1].contiguous()), tokens[:, 1:])

    return loss


def optimiser(model: nn.Module) -> torch.optim.Optimizer:
    def decays(p: nn.Parameter) -> bool:
        return p.ndim > 1 and not getattr(p, "_no_weight_decay", False)

    parameters = list(model.parameters())
    capturable = parameters[0].is_cuda
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if decays(p)], "weight_decay": 0.1},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True, capturable=capturable)


def batch(T: int, vocab: int, tokens: int = TOKENS, device: str = "cuda", seed: int = 1) -> Tensor:
    """Tokens [B, T + 1] with B T = `tokens`."""
    g = torch.Generator(device).manual_seed(seed)
    return torch.randint(vocab, (tokens // T, T + 1), device=device, generator=g)


def step_of(model: PrismModel, loss: Loss, tokens: Tensor) -> Callable[[], Tensor]:
    adam = optimiser(model)

    def step() -> Tensor:
        found = loss(tokens)
        found.backward()
        adam.step()
        adam.zero_grad()
        return found.detach()

    return step


def check(
    arm: Arm, model: PrismModel, loss: Loss, tokens: Tensor, size: Size = FULL_SIZE
) -> dict[str, float]:
    """Loss and gradients of `model` against float32 on `chunked`, of the parameters that both have (with
    fla's layer: all outside of it). Raises where they do not agree to what bfloat16 allows."""
    device = tokens.device.type
    reference = build(Arm(arm.L, arm.full), size, device, scan_backend="chunked")
    exact = 0.0
    for row in tokens.split(1):  # the plain backend keeps much more for its backward pass
        with torch.autocast(device, enabled=False):
            part = cross_entropy(reference(row[:, :-1]), row[:, 1:]) / len(tokens)
        part.backward()
        exact += float(part.detach())
    found = loss(tokens)
    found.backward()
    want = {name: p.grad for name, p in reference.named_parameters()}
    got = {name: p.grad for name, p in model.named_parameters() if name in want}
    assert all(g is not None for g in (*want.values(), *got.values()))
    missed = sum(float((g - want[n]).square().sum()) for n, g in got.items())  # type: ignore[operator]
    row = {
        "loss": float(found.detach()),
        "loss_reference": exact,
        "gradient_error": math.sqrt(missed / sum(float(want[n].square().sum()) for n in got)),  # type: ignore[union-attr]
    }
    model.zero_grad()
    if not (abs(row["loss"] - exact) < 0.01 and row["gradient_error"] < 0.05):
        raise RuntimeError(f"{arm}: expected the loss and gradients of the reference, came {row}")
    return row


def times(step: Callable[[], Tensor], steps: int) -> list[float]:
    """Milliseconds of each step; ValueError where the last loss is not finite."""
    for _ in range(3):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        last = step()
        event.record()
    torch.cuda.synchronize()
    if not math.isfinite(float(last)):
        raise ValueError(f"loss: expected a finite number, came {float(last)}")
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step as one CUDA graph. It must have run before, so that nothing is compiled or tuned inside."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = step()

    def replay() -> Tensor:
        graph.replay()
        return last

    return replay


def measure(step: Callable[[], Tensor], steps: int) -> dict[str, Any]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    launched = times(step, steps)
    row: dict[str, Any] = {"n": steps, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    row |= {"ms_launched": statistics.median(launched), "ms_launched_range": [min(launched), max(launched)]}
    try:
        replayed = times(captured(step), steps)
    except Exception as failure:  # a layer that cannot be captured is timed as it can be run
        with contextlib.suppress(RuntimeError):  # the capture's own error, once more
            torch.cuda.synchronize()
        row["graph"], replayed = f"{type(failure).__name__}: {failure}"[:300], launched
    median = statistics.median(replayed)
    row |= {"ms": median, "ms_range": [min(replayed), max(replayed)], "loss_last": float(step())}
    return row | {"tokens_per_second": 1e3 * TOKENS / median}


GROUPS = {
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "optimiser": ("adam",),
    "elementwise, fused": ("triton_", "causal_conv1d", "l2norm", "layer_norm", "beta_sigmoid"),
    "scan": ("chunk_", "recompute_w_u", "prepare_wy", "solve_tril", "gdn_gate", "main_kernel"),
}
"""Group of kernels -> parts of their names, those of torch.compile and of fla; the first that fits counts."""
OURS = {"short_conv": "short convolutions", "chain": "refinement", "refine": "refinement"}
"""Group of our kernels by how their names start; all others are the scan's."""


def group_of(name: str, ours: set[str]) -> str:
    """`ours`: the names of our kernels."""
    if name in ours:
        return next((group for start, group in OURS.items() if name.startswith(start)), "scan")
    fits = (group for group, marks in GROUPS.items() if any(mark in name.lower() for mark in marks))
    return next(fits, "other")


def profile(step: Callable[[], Tensor], steps: int = 3) -> tuple[dict[str, float], list[str]]:
    """Milliseconds of GPU time a step by group of kernels, and the 60 kernels that take most, as lines."""
    ours = [vars(module) for name, module in sys.modules.items() if name.startswith("prism.scan.triton.")]
    ours = {name for names in ours for name in names if name.endswith("_kernel")}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    groups: dict[str, float] = {}
    kernels: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name, ms = event.name, event.device_time / 1e3 / steps
        group = group_of(name, ours)
        groups[group] = groups.get(group, 0.0) + ms
        kernels.setdefault(f"{group:18} {name[:110]}", []).append(ms)
    ranked = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:60]
    lines = [f"{sum(t):8.3f} ms {len(t) / steps:6.1f} x {name}" for name, t in ranked]
    return {name: round(ms, 3) for name, ms in groups.items()}, lines


def run_part(name: str, args: argparse.Namespace) -> None:
    """Builds, checks and warms up, waits for its turn, then times; every row also goes to a file at once."""
    arm = ARMS[name]
    if arm.mixer == "fla":
        tune_quickly()
    shapes = {T: batch(T, FULL_SIZE.vocab) for T in args.lengths}
    runs = []
    for mode in arm.modes if args.modes is None else [mode for mode in arm.modes if mode in args.modes]:
        model = build(arm)
        loss = loss_of(model, mode)
        found = check(arm, model, loss, next(iter(shapes.values())))
        for tokens in shapes.values():
            loss(tokens).backward()
        model.zero_grad()
        runs.append((mode, model, loss, found))
        torch.cuda.empty_cache()
    wait_for_turn()
    for mode, model, loss, found in runs:
        for T, tokens in shapes.items():
            row: dict[str, Any] = {"arm": name, "mode": mode, "T": T, "B": len(tokens), "L": arm.L}
            row |= {"parameters": model.num_parameters(), "state": model.state_size()[0], "check": found}
            row |= {
                "mlp_hidden": round(model.config.mlp_ratio * model.config.d_model),
                "scan": scan_of(arm, T),
            }
            try:
                step = step_of(model, loss, tokens)
                row |= measure(step, args.steps)
                if T == PROFILED:
                    row["kernel_ms"], lines = profile(step)
                    if args.profiles:
                        path = args.profiles / f"{name.replace(' ', '')}_{mode}.txt"
                        path.write_text("\n".join(lines) + "\n")
            except Exception as failure:  # one row that fails must not hide the others
                row["failed"] = f"{type(failure).__name__}: {failure}"[:500]
            with args.out.with_suffix(".jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            report(row)
            torch.cuda.empty_cache()


def scan_of(arm: Arm, T: int) -> str:
    """Which kernels the scan of a row runs."""
    if arm.mixer == "fla":
        return "fla"
    from prism.scan.triton import choose

    heads, width = FULL_SIZE.heads, FULL_SIZE.d // FULL_SIZE.heads
    return choose(TOKENS, TOKENS // T, heads, width, width, arm.L).__name__.rsplit(".", 1)[-1]


def run(
    names: list[str], args: argparse.Namespace, write: Callable[[list[dict[str, Any]]], object]
) -> list[dict[str, Any]]:
    """The rows of the named arms; `write` gets those measured so far after every turn."""
    command = [sys.executable, __file__, "--out", str(args.out), "--steps", str(args.steps), "--lengths"]
    command += [*map(str, args.lengths), *(["--modes", *args.modes] if args.modes else [])]
    command += ["--profiles", str(args.profiles)] if args.profiles else []
    parts = []
    for name in names:
        env = dict(os.environ)
        if ARMS[name].mixer == "fla":
            env["PYTHONPATH"] = os.pathsep.join([env.get("PYTHONPATH", "."), str(args.peers.resolve())])
        parts.append(Part(name, [*command, "--part", name], env))
    return take_turns(parts, args.seconds, args.turn, None, write)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="folder with fla's packages, on the path of its part only")
    parser.add_argument("--parts", nargs="+", choices=ARMS, help="default: ours, and fla with --peers")
    parser.add_argument("--modes", nargs="+", choices=("compiled", "skeleton", "eager"), help="default: all")
    parser.add_argument("--lengths", nargs="+", type=int, choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--steps", type=int, default=15, help="timed steps of a row")
    parser.add_argument("--seconds", type=float, default=900, help="for all parts to compile; others end")
    parser.add_argument("--turn", type=float, default=120, help="seconds for one part to be timed")
    parser.add_argument("--out", type=Path, default=RESULTS / "model_h200.json")
    parser.add_argument("--keep", type=Path, help="earlier results, for the rows that are not run now")
    parser.add_argument("--profiles", type=Path, help="folder for a list of kernels a row, at T = 4,096")
    parser.add_argument("--figure", action="store_true", help="run nothing, draw what --out holds")
    parser.add_argument("--part", choices=ARMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args.part, args)
        return
    if not args.figure:
        if not torch.cuda.is_available():
            parser.error("needs a CUDA GPU")
        parts = args.parts or [name for name, arm in ARMS.items() if arm.mixer == "prism" or args.peers]
        if args.peers is None and any(ARMS[name].mixer == "fla" for name in parts):
            parser.error("the part fla needs --peers")
        for folder in (args.out.parent, args.profiles):
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
        lines = args.out.with_suffix(".jsonl")
        lines.unlink(missing_ok=True)
        kept = json.loads(args.keep.read_text())["rows"] if args.keep else []
        if args.peers:
            sys.path.append(str(args.peers))
        document = {
            "device": torch.cuda.get_device_name(),
            "versions": {package: version(package) for package in PEERS},
            "seeds": {"weights": 0, "tokens": 1},
            "tokens_a_batch": TOKENS,
            "size": vars(FULL_SIZE),
            "precision": "float32 weights and residual stream, bfloat16 autocast, fused AdamW",
        }

        def write(rows: list[dict[str, Any]]) -> None:
            if any("ms" in row for row in rows):  # nothing measured takes the place of no earlier result
                merged = with_kept(kept, rows, ("arm", "mode", "T"), "ms")
                args.out.write_text(json.dumps(document | {"rows": merged}, indent=1) + "\n")

        if not any("ms" in row for row in run(parts, args, write)):
            parser.exit(1, f"nothing was measured, the wait for parts being --seconds {args.seconds:.0f}\n")
        lines.unlink(missing_ok=True)
    document = json.loads(args.out.read_text())
    print(table(document["rows"]))
    for row in document["rows"]:
        if "kernel_ms" in row:
            groups = ", ".join(f"{name} {ms:.2f}" for name, ms in row["kernel_ms"].items())
            print(f"{row['arm']}, {row['mode']}, T = {row['T']}, GPU ms a step: {groups}")
    print(figure(document, args.out.with_suffix("")))


if __name__ == "__main__":
    main()
