import io

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from ablations import figures, report
from ablations.statistics import wilson

NASTY = "<script>alert('x')</script> | [a](b)"


@pytest.fixture
def rows(make_rows):
    return make_rows(
        {
            ("xor", "GDN"): ({"n_refine": 0}, [0.7, 0.6, None]),
            ("xor", NASTY): ({}, [1.0, 0.99, 0.98]),
            ("parity", "GDN"): ({"n_refine": 0}, [0.6]),
        }
    )


def test_summary_counts_failures_and_keeps_n(rows):
    summary = report.summarize(rows).set_index(["task", "arm"])
    gdn = summary.loc[("xor", "GDN")]
    assert (gdn["n"], gdn["n_finished"], gdn["failed"], gdn["solved"]) == (3, 2, 1, 0)
    assert gdn["accuracy"] == pytest.approx(0.65)
    assert gdn["success_high"] == wilson(0, 3).high  # the failed seed is a trial too
    other = summary.loc[("xor", NASTY)]
    assert (other["n"], other["solved"], other["success"]) == (3, 3, 1.0)
    assert other["success_low"] < 0.5
    single = summary.loc[("parity", "GDN")]
    assert single["n"] == 1
    assert np.isnan(single["success_low"])
    assert (
        report.cells_of(
            single.rename(("parity", "GDN")).to_frame().T.reset_index(names=["task", "arm"]).iloc[0]
        )["accuracy"]
        == "0.600 [n = 1]"
    )


def test_an_arm_whose_seeds_all_failed_is_still_in_the_table(make_rows):
    summary = report.summarize(make_rows({("xor", "paper"): ({}, [None, None])}))
    assert summary["failed"].tolist() == [2]
    assert np.isnan(summary["accuracy"].iloc[0])
    assert "0 of 2" in report.markdown(summary)


def test_markup_is_escaped_everywhere(rows):
    summary = report.summarize(rows)
    page = report.html(summary)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    text = report.markdown(summary)
    assert "<script>" not in text
    assert "](b)" not in text
    widths = {line.replace("\\|", "").count("|") for line in text.splitlines()}
    assert len(widths) == 1
    console = Console(width=200, record=True, file=io.StringIO())
    for table in report.rich_tables(summary):
        console.print(table)
    assert "[a](b)" in console.export_text()


def test_notes_name_failures_and_the_backend(rows):
    text = "\n".join(report.notes(rows))
    assert "scan backend that ran: chunked" in text
    assert "diverged: xor, GDN, seed 2: non-finite loss or gradient at step 3" in text


def test_figures_draw_what_the_rows_hold(rows, tmp_path):
    ax = figures.accuracy_points(rows, "xor")
    drawn = sorted(x for points in ax.collections for x in points.get_offsets()[:, 0])
    assert drawn == pytest.approx(sorted([0.7, 0.6, 1.0, 0.99, 0.98]))
    assert any("1 failed" in text.get_text() for text in ax.texts)
    assert {"chance", "ceiling"} <= {text.get_text() for text in ax.texts}
    curves = figures.learning_curves(rows, "xor")
    lines = {line.get_label(): line for line in curves.lines}
    assert lines["GDN (n = 2)"].get_ydata()[-1] == pytest.approx(0.65)
    paths = figures.draw_all(rows, tmp_path)
    assert all(path.stat().st_size > 5000 and path.with_suffix(".pdf").exists() for path in paths)
    with pytest.raises(ValueError, match="task: expected one of"):
        figures.accuracy_points(rows, "mqar")


def test_arms_keep_their_look():
    looks = figures.look_of([f"arm {i}" for i in range(8)])
    assert len({tuple(map(str, look.values())) for look in looks.values()}) == 8
    assert len({look["color"] for look in looks.values()}) == 8


def test_empty_tables_are_no_error():
    assert report.summarize(pd.DataFrame({"role": [], "task": [], "arm": []})).empty
