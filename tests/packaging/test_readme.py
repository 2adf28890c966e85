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


def test_gpu_figures_are_those_of_the_benchmarks():
    def of(name: str):
        return json.loads((ROOT / "benchmarks/results" / name).read_text())["rows"]

    speed = {
        r["compile"]: r["tokens_per_second"]
        for r in of("training_cuda.json")
        if r["cuda_graph"] and r["L"] == 2
    }
    assert f"| training step, captured | {speed[False] / 1e6:.1f} M tokens/s" in README
    assert f"| the same, compiled and captured | {speed[True] / 1e6:.1f} M tokens/s" in README
    tiny = {(r["kernel"], r["sequences"], r["L"]): r for r in of("scan_tiny_h200.json") if r["D"] == 16}
    for sequences, L in ((512, 0), (512, 2), (4096, 0), (4096, 2)):
        ours = tiny["prism float32", sequences, L]
        rivals = [
            r
            for (kernel, *shape), r in tiny.items()
            if kernel.startswith("chunked") and shape == [sequences, L]
        ]
        graph, eager = (min(r[k] for r in rivals) / ours[k] for k in ("graph_us", "eager_us"))
        shown = f"{graph:.2f}" if round(graph, 1) == 5 and graph < 5 else f"{graph:.1f}"
        assert f"| {shown}x in a graph, {eager:.1f}x launched |" in README
    scan = {(r["shape"], r["L"]): r["both"] for r in of("scan_h200.json") if r["kernel"] == "prism"}
    first = "4x4096x16x128"
    assert f"{scan[first, 0]:.2f} ms forward + backward\nat L = 0, {scan[first, 2]:.2f} ms at L = 2" in README


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
