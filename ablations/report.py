"""From the rows of a run to its table, its findings in words, and the files that hold them.

`summarize` is the table as data; `rich_tables`, `markdown` and `html` show it. `write_report` puts table,
findings and figures under a run's directory; it needs nothing but the stored cells, so it can be repeated.
"""

from __future__ import annotations

import html as html_escape
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ablations import claims, store
from ablations.statistics import Estimate, bootstrap_mean, solved, wilson

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HEADINGS = {
    "task": "task",
    "arm": "arm",
    "solved": "solved",
    "success": "success rate [95%]",
    "accuracy": "mean accuracy [95%]",
    "n": "n",
    "failed": "failed",
    "chance": "chance",
    "ceiling": "ceiling",
    "parameters": "parameters",
    "state_size": "state",
    "learning_rate": "lr",
}


_FIRST = ("accuracy", "learning_curves")


def summarize(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per (task, arm) over its reported seeds.

    n seeds, of which `solved` solved the task and `failed` did not finish; success rate with Wilson's
    interval (over n: a failed seed has not solved anything); mean test accuracy of the n_finished others with
    a bootstrap interval over seeds; NaN bounds where n is 1. Parameters and state_size are per model.
    """
    summary = []
    for (task, arm), of_arm in rows[rows["role"] == "report"].groupby(["task", "arm"], sort=False):
        columns = [of_arm[name].to_numpy(dtype=float) for name in ("test_accuracy", "chance", "ceiling")]
        hits = int(solved(*columns).sum())
        finished = columns[0][np.isfinite(columns[0])]
        success = wilson(hits, len(of_arm))
        accuracy = bootstrap_mean(finished) if len(finished) else Estimate(np.nan, np.nan, np.nan, 0)
        first = of_arm.iloc[0]
        summary.append(
            {
                "task": task,
                "arm": arm,
                "n": len(of_arm),
                "solved": hits,
                "success": success.value,
                "success_low": success.low,
                "success_high": success.high,
                "n_finished": accuracy.n,
                "failed": int((of_arm["status"] != "ok").sum()),
                "accuracy": accuracy.value,
                "accuracy_low": accuracy.low,
                "accuracy_high": accuracy.high,
                "chance": first["chance"],
                "ceiling": first["ceiling"],
                "parameters": int(first["parameters"]),
                "state_size": int(first["state_size"]),
                "learning_rate": first["learning_rate"],
                "scan_backend": ", ".join(sorted(of_arm["scan_backend"].dropna().unique())),
            }
        )
    return pd.DataFrame(summary)


def cells_of(line: pd.Series) -> dict[str, str]:
    """The texts of one line of the summary, by HEADINGS."""
    return {
        "task": str(line["task"]),
        "arm": str(line["arm"]),
        "solved": f"{line['solved']} of {line['n']}",
        "success": _interval(line["success"], line["success_low"], line["success_high"], 2),
        "accuracy": _interval(line["accuracy"], line["accuracy_low"], line["accuracy_high"], 3),
        "n": str(line["n"]),
        "failed": str(line["failed"]),
        "chance": f"{line['chance']:.3f}",
        "ceiling": f"{line['ceiling']:.3f}",
        "parameters": f"{line['parameters']:,}",
        "state_size": f"{line['state_size']:,}",
        "learning_rate": f"{line['learning_rate']:g}",
    }


def rich_tables(summary: pd.DataFrame) -> list[Table]:
    """The summary for a terminal, a table per task with chance and ceiling in its title."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    tables = []
    shown = [name for name in _columns(summary) if name not in ("task", "n", "chance", "ceiling")]
    for task, lines in summary.groupby("task", sort=False):
        levels = f"chance {lines['chance'].iloc[0]:.3f}, ceiling {lines['ceiling'].iloc[0]:.3f}"
        table = Table(
            title=escape(f"{task} ({levels})"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
        )
        for name in shown:
            table.add_column(HEADINGS[name], justify="left" if name == "arm" else "right", no_wrap=True)
        for _, line in lines.iterrows():
            texts = cells_of(line)
            table.add_row(*(escape(texts[name]) for name in shown))
        tables.append(table)
    return tables


def markdown(summary: pd.DataFrame) -> str:
    """The summary as a Markdown table."""
    shown = _columns(summary)
    lines = ["| " + " | ".join(HEADINGS[name] for name in shown) + " |"]
    lines.append("|" + "|".join("---" if name in ("task", "arm") else "--:" for name in shown) + "|")
    for _, line in summary.iterrows():
        texts = cells_of(line)
        lines.append("| " + " | ".join(_escape_markdown(texts[name]) for name in shown) + " |")
    return "\n".join(lines)


def html(summary: pd.DataFrame) -> str:
    """The summary as an HTML table; every text is escaped."""
    shown = _columns(summary)
    lines = ["<table>", "<tr>" + "".join(f"<th>{HEADINGS[name]}</th>" for name in shown) + "</tr>"]
    for _, line in summary.iterrows():
        texts = cells_of(line)
        lines.append(
            "<tr>" + "".join(f"<td>{html_escape.escape(texts[name])}</td>" for name in shown) + "</tr>"
        )
    return "\n".join([*lines, "</table>"])


def notes(rows: pd.DataFrame) -> list[str]:
    """What a reader must know of the numbers: definitions, device, backend, failures."""
    reported = rows[rows["role"] == "report"]
    backends = ", ".join(sorted(reported["scan_backend"].dropna().unique())) or "none"
    lines = [
        f"Trained on {_listed(reported['device'])} in {_listed(reported['dtype'])}; "
        f"scan backend that ran: {backends}.",
        "Solved: test accuracy >= chance + 0.95 (ceiling - chance). Success rate: Wilson interval over n "
        "seeds; mean accuracy: bootstrap interval over the seeds that finished; no interval over one seed. "
        "State: floats of recurrent memory per sequence.",
    ]
    if len(rows) > len(reported):
        lines.append("Learning rates were chosen on validation, with seeds that are not reported.")
    failed = reported[reported["status"] != "ok"]
    for _, row in failed.iterrows():
        reason = str(row["error"]).strip().splitlines()[-1]
        lines.append(f"{row['status']}: {row['task']}, {row['arm']}, seed {row['seed']}: {reason}")
    return lines


def write_report(run: Path | str, figures: bool = True) -> dict[str, Path]:
    """Write summary.csv, report.md, report.html and figures/ under a run's directory; returns the paths by
    name.

    Figures that are in figures/ already (the probes') are shown after the two that are drawn here.
    """
    run = Path(run)
    rows = store.load(run)
    summary = summarize(rows)
    paths = {"table": run / "summary.csv", "markdown": run / "report.md", "html": run / "report.html"}
    summary.to_csv(paths["table"], index=False)
    if figures:
        from ablations import figures as drawing

        drawing.draw_all(rows, run)
        paths["figures"] = run / "figures"
    drawn = sorted((run / "figures").glob("*.png"), key=lambda path: (path.stem not in _FIRST, path.stem))
    sections = [(f"What was found on {task}", lines) for task, lines in claims.sections(rows).items()]
    sections.append(("Notes", [claims.multiplicity(claims.findings(rows)), *notes(rows)]))
    paths["markdown"].write_text(_markdown_page(summary, sections, drawn, run))
    paths["html"].write_text(_html_page(summary, sections, drawn, run))
    return paths


def console() -> Console:
    """The terminal, or 110 columns at least where the output goes into a file."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=max(110, found.width))


def print_report(rows: pd.DataFrame, paths: dict[str, Path], seconds: float | None = None) -> None:
    """Table, findings, notes and paths on the terminal (at least 110 columns where it is not one)."""
    from rich.markup import escape

    screen = console()
    for table in rich_tables(summarize(rows)):
        screen.print(table)
    screen.print("[bold]What was found[/bold]")
    for task, lines in claims.sections(rows).items():
        screen.print(f"[bold]{escape(task)}[/bold]")
        for line in lines:
            screen.print(f"• {escape(line)}", highlight=False)
    screen.print(escape(claims.multiplicity(claims.findings(rows))), highlight=False)
    screen.print("\n[bold]Notes[/bold]")
    for line in notes(rows):
        screen.print(f"• {escape(line)}", highlight=False)
    screen.print("\n[bold]Files[/bold]")
    for name, path in paths.items():
        screen.print(f"• {name}: {escape(str(path))}", highlight=False)
    if seconds is not None:
        screen.print(f"\n{seconds:.0f} seconds in all.", highlight=False)


def _markdown_page(
    summary: pd.DataFrame, sections: list[tuple[str, list[str]]], drawn: Sequence[Path], run: Path
) -> str:
    parts = ["# Ablation report", markdown(summary)]
    for title, lines in sections:
        parts.append(
            f"## {_escape_markdown(title)}\n\n" + "\n".join(f"- {_escape_markdown(line)}" for line in lines)
        )
    parts += [f"![{path.stem}]({path.relative_to(run).as_posix()})" for path in drawn]
    return "\n\n".join(parts) + "\n"


def _html_page(
    summary: pd.DataFrame, sections: list[tuple[str, list[str]]], drawn: Sequence[Path], run: Path
) -> str:
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse}"
        "td,th{padding:.2em .7em;border-bottom:1px solid #ccc;text-align:right}"
        "td:nth-child(-n+2),th:nth-child(-n+2){text-align:left}img{max-width:100%}"
    )
    parts = ["<!doctype html><meta charset='utf-8'><title>Ablation report</title>", f"<style>{style}</style>"]
    parts += ["<h1>Ablation report</h1>", html(summary)]
    for title, lines in sections:
        items = "".join(f"<li>{html_escape.escape(line)}</li>" for line in lines)
        parts.append(f"<h2>{html_escape.escape(title)}</h2><ul>{items}</ul>")
    for path in drawn:
        source = html_escape.escape(path.relative_to(run).as_posix(), quote=True)
        parts.append(f"<p><img src='{source}' alt='{html_escape.escape(path.stem, quote=True)}'></p>")
    return "\n".join(parts) + "\n"


def _columns(summary: pd.DataFrame) -> list[str]:
    """Headings to show: no column of failures where nothing failed."""
    return [name for name in HEADINGS if name != "failed" or summary["failed"].any()]


def _interval(value: float, low: float, high: float, digits: int) -> str:
    if not np.isfinite(value):
        return "–"
    if not np.isfinite(low):
        return f"{value:.{digits}f} [n = 1]"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _listed(values: pd.Series) -> str:
    return ", ".join(sorted(str(value) for value in values.unique()))


def _escape_markdown(text: Any) -> str:
    escaped = html_escape.escape(str(text), quote=False)
    for character in "\\`*_|":
        escaped = escaped.replace(character, "\\" + character)
    return escaped.replace("](", "]\\(").replace("\n", " ")  # brackets stay: intervals are written with them
