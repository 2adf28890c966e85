"""The README's numbers are those of the files that commands of this repository wrote."""

import csv
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_table_is_the_summary_of_the_demo():
    rows = list(csv.DictReader((ROOT / "docs/demo/summary.csv").read_text().splitlines()))
    assert len(rows) == 24
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        cells = [arm, f"{int(own[0]['parameters']):,}", f"{int(own[0]['state_size']):,}"]
        for row in own:
            low, high = float(row["accuracy_low"]), float(row["accuracy_high"])
            mean = f"{float(row['accuracy']):.3f} [{low:.3f}, {high:.3f}]"
            cells.append(f"{row['solved']} of {row['n']}, {mean}")
        assert f"| {' | '.join(cells)} |" in README


def test_ratios_are_those_of_the_benchmarks():
    def of(name: str):
        return json.loads((ROOT / "benchmarks/results" / name).read_text())

    training = {row["D"]: row["ratio"] for row in of("training_cpu.json")["rows"]}
    assert f"| {of('scan_cpu.json')['target']['times as fast as transformers']:.2f}x |" in README
    assert f"| {training[16]:.2f}x |" in README
    assert f"| {training[128]:.1f}x |" in README
    assert f"| {of('probes_cpu.json')['speedup']['probe']:.0f}x |" in README
    speed = {row["task"]: row["million_tokens_per_second"] for row in of("tasks_cpu.json")["tasks"]}
    assert ", ".join(f"{speed[name]:.0f}" for name in ("mqar", "xor", "parity")) + " M tokens/s" in README
    ceilings = {row["task"]: row["ceiling"] for row in of("release_ceilings.json")}
    three = [ceilings[f"{name}_release"] for name in ("variable_tracking", "silence_gate", "mux")]
    assert "ceilings of {:.3f}, {:.3f} and {:.3f}".format(*three) in README


def rows_of(name: str):
    return json.loads((ROOT / "benchmarks/results" / name).read_text())["rows"]


def short(ratio: float) -> str:
    """One digit; two where one would round up to the target."""
    return f"{ratio:.2f}x" if ratio < 5 <= round(ratio, 1) else f"{ratio:.1f}x"


def test_figures_of_many_small_models_are_those_of_the_benchmarks():
    speed = {
        r["compile"]: r["tokens_per_second"] / 1e6
        for r in rows_of("training_cuda.json")
        if r["cuda_graph"] and r["L"] == 2 and r["scan_backend"] == "triton"
    }
    assert f"| training step, captured in a CUDA graph | {speed[False]:.1f} M tokens/s" in README
    assert f"| the same, compiled and captured | {speed[True]:.1f} M tokens/s" in README
    tiny = {(r["kernel"], r["sequences"], r["D"], r["L"]): r for r in rows_of("scan_tiny_h200.json")}

    def ratio(rival: str, dtype: str, key: str, *shape: int) -> float:
        best = min(
            r[key] for (kernel, *own), r in tiny.items() if kernel.startswith(rival) and own == [*shape]
        )
        return best / tiny[f"prism {dtype}", *shape][key]

    for D in (16, 32):
        shapes = [(n, D, L) for n in (512, 4096) for L in (0, 2)]
        ratios = [ratio("chunked", "float32", "graph_us", *shape) for shape in shapes]
        line = next(x for x in README.splitlines() if f"| {', '.join(map(short, ratios))} | 5x" in x)
        assert ("missed" in line) == (min(ratios) < 5), line
    shapes = [(n, D, 0) for D in (16, 32) for n in (512, 4096)]
    shown = ", ".join(short(ratio("fla", "bfloat16", "graph_us", *shape)) for shape in shapes)
    assert f"| {shown} | 4x, missed but in one |" in README
    assert sum(ratio("fla", "bfloat16", "graph_us", *shape) >= 4 for shape in shapes) == 1
    launched = [ratio("chunked", "float32", "eager_us", n, D, L) for n, D, L in {k[1:] for k in tiny}]
    fla = [ratio("fla", "bfloat16", "eager_us", *shape) for shape in shapes]
    shown = f"{min(launched):.1f}x to {max(launched):.1f}x; fla {min(fla):.1f}x to {max(fla):.1f}x"
    assert f"| all of these launched one by one | {shown} | 5x; 4x, missed but in one |" in README
    assert max(launched) < 5
    assert sum(x >= 4 for x in fla) == 1


def test_figures_of_long_sequences_are_those_of_the_benchmarks():
    scan = {(r["kernel"], r["shape"], r["L"]): r for r in rows_of("scan_h200.json") if "both" in r}
    first = "4x4096x16x128"
    ours, rank3, fla = (scan[kernel, first, L] for kernel, L in (("prism", 0), ("prism", 2), ("fla", 0)))
    qla, three, dplr = (
        scan[kernel, first, L] for kernel, L in (("flash-qla", 0), ("fla product", 2), ("fla DPLR", 2))
    )
    for label, mine, peer, key in (
        ("L = 0 against fla 0.6.0, forward", ours, fla, "forward"),
        ("L = 0 against fla, forward + backward", ours, fla, "both"),
        ("L = 0 against flash-qla 0.1.3, forward", ours, qla, "forward"),
        ("L = 0 against flash-qla, forward + backward", ours, qla, "both"),
        ("L = 2 against flash-qla's L = 0, forward + backward", rank3, qla, "both"),
        ("L = 2 against fla's L = 0, forward + backward", rank3, fla, "both"),
        ("L = 2 against fla's product of three rank-1 writes", rank3, three, "both"),
        ("L = 2 against fla's DPLR on three sub-tokens a token, the same mathematics", rank3, dplr, "both"),
    ):
        launched, alone = peer[key] / mine[key], peer[f"gpu_{key}"] / mine[f"gpu_{key}"]
        shown = f"| {label} | {launched:.2f}x | {alone:.2f}x | "
        line = next(x for x in README.splitlines() if x.startswith(shown))
        target = float((line.split("|")[-2].split("x")[0]).strip() or 0)
        assert ("missed" in line) == (min(launched, alone) < target), line
    others = [
        [scan[kernel, shape, L] for kernel, L in (("prism", 0), ("prism", 2), ("fla", 0))]
        for shape in ("8x2048x32x64", "1x32768x16x128", "8x1024x8x64")
    ]
    for label, which, key in (
        ("(8, 1024, 8, 64), forward", 0, "forward"),
        ("the same, forward + backward", 0, "both"),
        ("L = 2 against fla's L = 0 there, forward + backward", 1, "both"),
    ):
        ratios = [[rows[2][k] / rows[which][k] for rows in others] for k in (key, f"gpu_{key}")]
        shown = " | ".join(", ".join(f"{ratio:.2f}x" for ratio in column) for column in ratios)
        line = next(x for x in README.splitlines() if f"{label} | {shown} | " in x)
        target = float(line.split("|")[-2].split("x")[0].strip())
        below = sum(ratio < target for ratio in ratios[1])
        assert ("missed by the kernels alone in two" in line) == (below == 2)
        assert below in (0, 2)
        assert min(ratios[0]) >= target
    assert f"| peak memory, L = 0, against fla | {ours['peak_mib'] / fla['peak_mib']:.2f}x |" in README
    B, T, H, D = 4, 4096, 16, 128
    floor_ms = 1e3 * B * T * H * (4 * 2 * D + 2 * 4) / 4.27e12  # bench_scan.floor_ms
    launched, alone = ours["forward"] / floor_ms, ours["gpu_forward"] / floor_ms
    assert f"| forward over what its bytes need, L = 0 | {launched:.1f}x | {alone:.1f}x | 5x |" in README
    assert max(launched, alone) <= 5
    times = [
        r["both"] for (kernel, shape, L), r in scan.items() if kernel == "prism" and cut(shape) and L == 0
    ]
    assert len(times) == 4
    assert f"slowest over fastest | {max(times) / min(times):.2f}x |" in README


def cut(shape: str) -> bool:
    """128 K tokens at H = 16, D = 128."""
    B, T, H, D = map(int, shape.split("x"))
    return B * T == 2**17 and (H, D) == (16, 128)


def test_figures_of_whole_models_are_those_of_the_benchmarks():
    speed: dict[tuple[str, int], float] = {}
    for row in rows_of("model_h200.json"):
        key = row["arm"], row["T"]
        speed[key] = max(speed.get(key, 0.0), row["tokens_per_second"])
    for arm, label in (
        ("L = 2, full", "L = 2, full matrices"),
        ("L = 2", "L = 2, matrices of rank 128"),
        ("fla", "fla's GatedDeltaNet layer in the same skeleton"),
    ):
        shares = [speed[arm, T] / speed["L = 0", T] for T in (2048, 4096, 8192, 16384)]
        low, high = (f"{share:.2f}x" for share in (min(shares), max(shares)))
        shown = low if low == high else f"{low} to {high}"
        assert f"| {label} | {speed[arm, 4096] / 1e3:.0f} K | {shown} |" in README
    assert f"| L = 0 | {speed['L = 0', 4096] / 1e3:.0f} K | 1 |" in README


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
