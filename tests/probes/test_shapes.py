"""The shapes in the signatures hold: every measure runs with jaxtyping's annotations enforced by beartype."""

import subprocess
import sys
from pathlib import Path

CODE = """
import jaxtyping
with jaxtyping.install_import_hook("probes", "beartype.beartype"):
    import probes
import torch
from prism import PrismConfig, PrismModel
sizes = {"d_model": 12, "n_layers": 2, "n_heads": 1, "n_value_heads": 2, "head_dim": 4, "expand_v": 1.5}
config = PrismConfig(vocab_size=8, **sizes)
model, inputs = PrismModel(config, seed=0), torch.randint(8, (20, 16))
options = {"readout": {"labels": inputs % 2, "at": [9]}, "causal_share": {"targets": inputs.roll(1, 1)}}
for name in probes.MEASURES:
    probes.measure(model, inputs, name, **options.get(name, {}))
try:
    probes.update_rank(model, inputs[0])
except jaxtyping.TypeCheckError:
    print("checked")
"""


def test_annotations_hold():
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=root)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "checked\n"
