"""Choose the demo's learning rates on validation: every arm and task at every candidate, from seeds never
reported.

    python benchmarks/demo_learning_rates.py            # writes benchmarks/results/demo_learning_rates.json

The choice is what `ablations.demo.LEARNING_RATES` holds (a test compares the two). The sweep resumes where it
stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))


def main() -> None:
    from ablations import demo

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/demo_learning_rates"), help="where cells are kept"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "demo_learning_rates.json")
    given = parser.parse_args()
    record = demo.choose_learning_rates(given.runs, given.workers)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["chosen"], indent=1))


if __name__ == "__main__":
    main()
