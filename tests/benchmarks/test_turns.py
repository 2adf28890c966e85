"""Benchmarks whose parts compile together and are timed in turn, and what the tables make of their rows."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def turns(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return load("_turns")


def part(turns, name, *lines):
    start = f"import sys, time; sys.path.insert(0, {str(FOLDER)!r}); from _turns import report, wait_for_turn"
    return turns.Part(name, [sys.executable, "-c", "\n".join([start, *lines])])


def test_parts_are_timed_one_after_the_other_once_all_are_ready(turns):
    timed = ["wait_for_turn()", "a = time.time(); time.sleep(0.2); report({'from': a, 'to': time.time()})"]
    parts = [
        part(turns, "late", "time.sleep(0.5)", "ready = time.time()", *timed, "report({'ready': ready})"),
        part(turns, "early", *timed),
    ]
    late, ready, early = turns.take_turns(parts, 60, 60, None, lambda rows: None)
    assert ready["ready"] <= late["from"]
    assert late["to"] <= early["from"]


def test_what_is_late_or_slow_or_broken_costs_its_own_rows_alone(turns, capfd, tmp_path):
    parts = [
        part(turns, "good", "wait_for_turn()", "report({'n': 1})", "print('by the way')"),
        part(turns, "never", "time.sleep(600)"),
        part(turns, "slow", "wait_for_turn()", "report({'n': 2})", "time.sleep(600)"),
        part(turns, "broken", "raise SystemExit(3)"),
    ]
    started = time.perf_counter()
    written: list[int] = []
    assert turns.take_turns(parts, 8, 2, None, lambda rows: written.append(len(rows))) == [{"n": 1}, {"n": 2}]
    assert written == [1, 1, 2, 2]  # after every turn
    assert time.perf_counter() - started < 60
    said = capfd.readouterr().out
    assert "good: by the way" in said
    for line in ("never was stopped", "slow was stopped", "broken ended with exit code 3"):
        assert line in said
    assert all(each.process.poll() is not None for each in parts)


def test_a_part_that_is_left_behind_ends(turns):
    """Nobody tells it that its turn has come: its stdin ends."""
    left = part(turns, "left", "wait_for_turn()", "report({'n': 1})")
    left.ready.wait(60)
    left.process.stdin.close()
    assert left.done.wait(60)
    assert left.process.returncode
    assert left.lines == []


def test_kept_rows_give_way_to_measured_ones(turns):
    kept = [{"k": "a", "us": 1}, {"k": "b", "us": 2}, {"k": "c", "failed": "so"}]
    new = [{"k": "a", "us": 3}, {"k": "b", "failed": "no"}, {"k": "c", "failed": "no"}, {"k": "d", "us": 4}]
    assert turns.with_kept(kept, new, ("k",), "us") == [kept[1], new[0], new[2], new[3]]
    assert turns.with_kept([], new, ("k",), "us") == new


def test_nothing_is_timed_before_the_gate(turns, tmp_path):
    gate = tmp_path / "gate"
    opener = part(turns, "opener", "time.sleep(6)", f"open({str(gate)!r}, 'w').write(str(time.time()))")
    timed = part(turns, "x", "wait_for_turn()", "report({'at': time.time()})")
    # It opens after the time in which parts must be ready.
    (row,) = turns.take_turns([timed], 5, 60, gate, lambda rows: None)
    assert opener.rows(60) == []
    assert row["at"] >= float(gate.read_text())


def test_ratios_are_to_the_fastest_of_a_rivals_rows(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    bench = load("bench_scan_tiny")
    shape = {"sequences": 512, "D": 16, "L": 0, "errors": {"o": 1e-7, "q": 1e-6}}
    rows = [
        {"kernel": "prism float32", **shape, "eager_us": 100.0, "graph_us": 10.0},
        {"kernel": "chunked C=16 float32", **shape, "eager_us": 600.0, "graph_us": 160.0},
        {"kernel": "chunked C=32 float32", **shape, "eager_us": 700.0, "graph_us": 45.0},
        {"kernel": "chunked C=64 float32", **shape, "failed": "RuntimeError: no"},
        {"kernel": "prism bfloat16", **shape, "eager_us": 50.0, "graph_us": 10.0},
        {"kernel": "fla bfloat16", **shape, "eager_us": 650.0, "not_captured": "CUDA error: capture"},
    ]
    assert [line.split(": ", 1)[1] for line in bench.verdicts(rows)] == [
        "4.5 times chunked C=32 float32 (BELOW the must; must 5, aim 15)",
        "6.0 times chunked C=16 float32 (must reached; must 5, aim 15)",
        "13.0 times fla bfloat16 (aim reached; must 4, aim 12)",
    ]
    table = bench.table(rows)
    assert "| 6.0, 16.0 |" in table
    assert "RuntimeError: no" in table
    assert "CUDA error: capture" in table
