"""The shapes in signatures are the shapes that run: every family under beartype, in a process of its own."""

import subprocess
import sys
from pathlib import Path

CODE = """
import torch
from jaxtyping import TypeCheckError, install_import_hook
with install_import_hook("tasks", "beartype.beartype"):
    import tasks
for name in tasks.names():
    task = tasks.get(name)
    for split in ("train", "val", "test"):
        batch = task.batch(3, split=split)
        answers = task.solve(batch.inputs)
        task.split_of(batch.inputs)
        tasks.scores(answers, batch)
    try:
        task.solve(batch.inputs[0])
    except TypeCheckError:
        continue
    raise SystemExit(f"{name}: one-dimensional inputs were taken for a batch")
tasks.get("running_parity", length=12, min_length=3, test_length=[13, 20]).batch(3, split="test").slices
print("checked", len(tasks.names()))
"""


def test_signatures_hold():
    root = Path(__file__).parents[2]
    child = subprocess.run(
        [sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.startswith("checked ")
