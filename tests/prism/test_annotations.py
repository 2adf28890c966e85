"""The shapes in the signatures are true: checked by jaxtyping and beartype over whole passes of every kind
of mixer.

In a process of its own, because the check is built in when a module is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

CHECKED = """
import torch
from jaxtyping import TypeCheckError, install_import_hook

modules = ["anchor", "attention", "hooks", "mixer", "model", "refinement"]
with install_import_hook([f"prism.{name}" for name in modules], "beartype.beartype"):
    import prism
    from prism import PrismConfig, PrismModel
    from prism.config import PRESETS
    from prism.hooks import knock_out, patch_state, swap_anchor

sizes = {"vocab_size": 9, "d_model": 6, "n_heads": 2, "n_value_heads": 4, "head_dim": 5, "expand_v": 1.4}
configs = [PrismConfig.preset(name, **sizes) for name in PRESETS]
changes = [{"anchor": "state"}, {"refine_keys": "base"}, {"refine_rank": 2}, {"erase": "none"}]
configs += [PrismConfig(**sizes, **change) for change in [*changes, {"mixer": "attention"}]]
x = torch.randint(9, (2, 7))
for config in configs:
    model = PrismModel(config, seed=0)
    hooks = [] if config.mixer == "attention" or not config.n_refine else [knock_out(0, 0)]
    _, cache = model.run_with_cache(x, hooks=hooks)
    if config.mixer != "attention":
        model.run_with_hooks(x, [patch_state(0, 3, cache.state(0, 3)[:, 0])])
        model.blocks[0].mixer.backend(model.embedding[x])
    if hooks and config.erase != "step":
        model.run_with_hooks(x, [swap_anchor()])
    _, before = model(x[:, :4], use_cache=True)
    model(x[:, 4:], before)
try:
    prism.anchor.causal_conv(torch.zeros(2, 7, 6), torch.zeros(5, 4))
except TypeCheckError:
    print(f"checked {len(configs)} configurations")
"""


def test_shapes_are_what_signatures_say():
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    made = subprocess.run(
        [sys.executable, "-c", CHECKED], env=env, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[-3000:]
    assert made.stdout == "checked 9 configurations\n"
