"""Table and figure of `bench_model.py`."""

from __future__ import annotations

import math
from pathlib import Path


def best(rows: list[dict]) -> dict[tuple[str, int], dict]:
    """The faster mode of every arm and T."""
    found: dict[tuple[str, int], dict] = {}
    for row in rows:
        key = row["arm"], row["T"]
        if "ms" in row and (key not in found or row["ms"] < found[key]["ms"]):
            found[key] = row
    return found


def table(rows: list[dict]) -> str:
    """Every row; shares above 1 are faster than L = 0."""
    base = {T: row for (arm, T), row in best(rows).items() if arm == "L = 0"}
    columns = [
        "arm",
        "mode",
        "parameters (M)",
        "T",
        "ms a step",
        "launched",
        "tokens/s",
        "of L = 0, same mode",
    ]
    columns += ["of best L = 0", "peak GiB", "gradient error", "scan"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [row["arm"], row["mode"], f"{row['parameters'] / 1e6:.1f}", str(row["T"])]
        if "failed" in row:
            cells.append(row["failed"].replace("|", "/").replace("\n", " "))
            lines.append("| " + " | ".join([*cells, *[""] * (len(columns) - len(cells))]) + " |")
            continue
        same = [
            r for r in rows if (r["arm"], r["mode"], r["T"]) == ("L = 0", row["mode"], row["T"]) and "ms" in r
        ]
        how = " (launched)" if "graph" in row else ""  # why there is no graph is in the row
        cells += [f"{row['ms']:.2f}{how}", f"{row['ms_launched']:.2f}", f"{row['tokens_per_second']:,.0f}"]
        cells.append(f"{same[0]['ms'] / row['ms']:.3f}" if same else "-")
        cells.append(f"{base[row['T']]['ms'] / row['ms']:.3f}" if row["T"] in base else "-")
        cells += [f"{row['peak_gib']:.1f}", f"{row['check']['gradient_error']:.1e}"]
        lines.append("| " + " | ".join([*cells, row["scan"]]) + " |")
    return "\n".join(lines)


def figure(document: dict, stem: Path) -> Path:
    """Tokens/s against T, and as a share of L = 0: the fastest mode of every arm."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from ablations.figures import look_of, paper_style, save

    rows = best(document["rows"])
    arms = [
        arm
        for arm in ("L = 0", "L = 1", "L = 2", "L = 2, full", "L = 4", "fla")
        if any(a == arm for a, _ in rows)
    ]
    names = {"fla": "fla GatedDeltaNet layer", "L = 0": "L = 0 (Gated DeltaNet)"}
    lengths = sorted({T for _, T in rows})
    with paper_style():
        drawn, (speed, share) = plt.subplots(1, 2, figsize=(6.4, 2.7), layout="constrained", sharex=True)
        for arm, look in look_of(arms).items():
            found = [rows.get((arm, T)) for T in lengths]
            tokens = [row["tokens_per_second"] / 1e3 if row else math.nan for row in found]
            of_base = [
                row["tokens_per_second"] / rows["L = 0", T]["tokens_per_second"]
                if row and ("L = 0", T) in rows
                else math.nan
                for row, T in zip(found, lengths, strict=True)
            ]
            speed.plot(lengths, tokens, label=names.get(arm, arm), **look)
            share.plot(lengths, of_base, **look)
        share.axhline(
            0.85, color="0.6", linewidth=0.7, linestyle=":", label="0.85 of L = 0: aimed at for L = 2"
        )
        for ax in (speed, share):
            ax.set_xscale("log", base=2)
            ax.set_xticks(lengths, [f"{T // 1024}K" for T in lengths])
            ax.minorticks_off()
            ax.set_xlabel("sequence length T")
            ax.set_ylim(0, 1.08 * ax.dataLim.y1)
        speed.set_ylabel("thousand tokens a second")
        share.set_ylabel("tokens a second over L = 0's")
        drawn.legend(loc="outside lower center", ncols=3, frameon=False)
        path = save(drawn, stem)
        plt.close(drawn)
    return path
