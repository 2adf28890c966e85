import json

import pandas as pd
import pytest

from ablations import store


@pytest.fixture
def make_rows():
    """Rows as `store.load` gives them, from {(task, arm): (fields of the model, accuracies by seed)}."""

    def make(cells, chance=0.5, ceiling=1.0, train=None):
        rows = []
        for (task, arm), (model, accuracies) in cells.items():
            for seed, accuracy in enumerate(accuracies):
                rows.append(
                    {
                        **dict.fromkeys(store.SCHEMA.names),
                        "task": task,
                        "arm": arm,
                        "seed": seed,
                        "role": "report",
                        "key": f"{task}-{arm}-{seed}",
                        "status": "ok" if accuracy is not None else "diverged",
                        "error": None if accuracy is not None else "non-finite loss or gradient at step 3",
                        "test_accuracy": float("nan") if accuracy is None else accuracy,
                        "chance": chance,
                        "majority": chance,
                        "ceiling": ceiling,
                        "parameters": 1000 + 100 * model.get("n_refine", 2),
                        "state_size": 256,
                        "learning_rate": 0.01,
                        "dtype": "float32",
                        "device": "cpu",
                        "scan_backend": "chunked",
                        "model": store.canonical_json(
                            {"n_refine": 2, "activation": "gelu", "short_conv": 0, **model}
                        ),
                        "train": store.canonical_json(
                            {"learning_rate": 0.01, "steps": 5, **(train or {}).get(arm, {})}
                        ),
                        "curve_step": [10, 20, 30],
                        "curve_val_accuracy": [0.5, 0.6, accuracy or float("nan")],
                    }
                )
        return pd.DataFrame(rows)

    return make


@pytest.fixture
def grid_file(tmp_path):
    """A grid of a few seconds, as a JSON file."""
    path = tmp_path / "grid.json"
    content = {
        "tasks": {"xor": {"length": 16}},
        "arms": {
            "PRISM": {"preset": "prism", "d_model": 8, "n_layers": 1, "mlp_ratio": 0},
            "GDN": {"base": "PRISM", "n_refine": 0},
        },
        "seeds": [0, 1],
        "train": {
            "steps": 6,
            "batch_size": 4,
            "eval_every": 3,
            "val_size": 8,
            "test_size": 16,
            "warmup_steps": 1,
        },
    }
    path.write_text(json.dumps(content))
    return path
