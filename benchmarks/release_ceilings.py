"""Best reachable accuracy of the release's task variants: derived, and simulated with fresh rows.

    python benchmarks/release_ceilings.py               # -> benchmarks/results/release_ceilings.json

For each variant: the ceiling that the suite states and where it comes from; the accuracy of the Bayes rule
(`solve`) on n rows and its standard error; the mean posterior of its answers (`certainty`), the same number
with less noise. For mqar also the accuracy of looking up the first occurrence of the key. Exit code 1 where
a simulation contradicts a ceiling by more than 4 standard errors.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import tasks

BLOCK = 50_000


def source(task) -> str:
    """How the suite knows the ceiling."""
    if task.name == "variable_tracking_release":
        return "mean posterior over 65,536 rows (tasks._release.CEILING_ROWS)"
    if task.ceiling < 1:
        return "derived: tasks.release_logic.ambiguous_ceiling"
    return "derived: the answer is determined by the inputs"


def first_occurrence(inputs: torch.Tensor) -> torch.Tensor:
    """The token after the first one that equals the queried key, wherever it stands."""
    key = (inputs[:, :-2] == inputs[:, -1:]).long().argmax(1, keepdim=True)
    return inputs.gather(1, key + 1)[:, 0]


def simulate(name: str, n: int) -> dict:
    """Accuracy and certainty of the Bayes rule on n rows of seed 1."""
    task = tasks.get(name)
    right, certainty, looked_up = [], [], []
    for step in range(n // BLOCK):
        batch = task.batch(BLOCK, seed=1, step=step)
        answer = batch.targets[:, -1]
        right.append((task.solve(batch.inputs)[:, -1] == answer).double())
        certainty.append(task.certainty(batch.inputs))
        if name == "mqar_release":
            looked_up.append((first_occurrence(batch.inputs) == answer).double())
    hits, sure = torch.cat(right), torch.cat(certainty)
    row = {
        "task": name,
        "params": task.params,
        "version": task.version,
        "ceiling": task.ceiling,
        "ceiling_standard_error": task.ceiling_error,
        "source": source(task),
        "n": len(hits),
        "accuracy": float(hits.mean()),
        "accuracy_standard_error": float(hits.std() / len(hits) ** 0.5),
        "certainty": float(sure.mean()),
        "certainty_standard_error": float(sure.std() / len(sure) ** 0.5),
        "chance": task.chance,
        "majority": task.majority,
    }
    if looked_up:
        x = torch.cat(looked_up)
        row["first_occurrence"] = float(x.mean())
        row["first_occurrence_standard_error"] = float(x.std() / len(x) ** 0.5)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=1_000_000, help=f"rows per task, a multiple of {BLOCK}")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/release_ceilings.json")
    args = parser.parse_args()
    if args.n < BLOCK or args.n % BLOCK:
        parser.error(f"--n: expected a multiple of {BLOCK}, got {args.n}")
    torch.set_num_threads(1)

    rows, wrong = [], []
    print(f"{'task':28}{'ceiling':>9}{'accuracy':>10}{'s.e.':>9}{'certainty':>11}{'s.e.':>9}  source")
    for name in tasks.names():
        if not name.endswith("_release"):
            continue
        row = simulate(name, args.n)
        rows.append(row)
        errors = (row["accuracy_standard_error"], row["certainty_standard_error"])
        print(
            f"{name:28}{row['ceiling']:9.5f}{row['accuracy']:10.5f}{errors[0]:9.5f}{row['certainty']:11.5f}"
            f"{errors[1]:9.5f}  {row['source']}"
        )
        if "first_occurrence" in row:
            print(f"{'':28}first occurrence instead: {row['first_occurrence']:.5f}")
        error = (errors[1] ** 2 + row["ceiling_standard_error"] ** 2) ** 0.5
        if abs(row["certainty"] - row["ceiling"]) > 4 * error + 1e-12:
            wrong.append(name)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(args.out)
    if wrong:
        print(f"contradicted by the simulation: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
