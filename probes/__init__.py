"""What is measured in a model: tokens in, labelled arrays (xarray.Dataset) and figures (matplotlib Axes) out.

ds = probes.update_rank(model, inputs)              # dims layer, matrix, sample, token, head
ax = probes.plot_update_rank(ds)
probes.save(ax, "figures/update_rank")              # PDF and PNG
ds = probes.measure(model, inputs, "state_rank", at=[0, 15, 31])   # by name: probes.MEASURES
"""

import importlib.util as _util
from pathlib import Path as _Path


def _require_own(*names: str) -> None:
    """Raise ImportError where a sibling package is missing, or another one or a mere folder hides it."""
    home = _Path(__file__).resolve().parent.parent
    for name in names:
        spec = _util.find_spec(name)
        origin = None if spec is None or spec.origin is None else _Path(spec.origin).resolve()
        if origin == home / name / "__init__.py":
            continue
        found = f"resolves to {origin or 'nothing'}"
        remedy = (
            "Other distributions carry that name too: uninstall them "
            f"(pip uninstall {name}) or install prism-lab in an environment of its own."
        )
        if spec is not None and origin is None:
            # A folder on sys.path (the working directory is) is a namespace package to Python, and comes
            # before an editable installation.
            folders = ", ".join(dict.fromkeys(spec.submodule_search_locations or ()))
            found = f"is hidden by a folder of that name without __init__.py: {folders}"
            remedy = "Rename it, or start Python elsewhere."
        raise ImportError(
            f"probes needs prism-lab's own package {name!r} at {home / name}, but {name!r} {found}. {remedy}"
        )


_require_own("prism", "tasks")

from probes._figures import save  # noqa: E402
from probes.anchor import (  # noqa: E402
    anchor_by_width,
    anchor_fidelity,
    anchor_horizon,
    plot_anchor_by_width,
    plot_anchor_fidelity,
    plot_anchor_horizon,
)
from probes.causal import causal_share, plot_causal_share  # noqa: E402
from probes.explorer import explore_state, plot_state  # noqa: E402
from probes.fidelity import (  # noqa: E402
    gain_fidelity,
    plot_gain_fidelity,
    plot_solver_fidelity,
    solver_fidelity,
)
from probes.measures import MEASURES, join_seeds, measure, plot  # noqa: E402
from probes.memory import plot_readback, plot_transition, readback, transition  # noqa: E402
from probes.perturbation import perturbation_growth, plot_perturbation_growth  # noqa: E402
from probes.readout import plot_readout, readout  # noqa: E402
from probes.residual import (  # noqa: E402
    plot_residual_decay,
    plot_step_cosines,
    residual_decay,
    step_cosines,
)
from probes.state import plot_spectrum, plot_state_rank, state_rank, window_rank  # noqa: E402
from probes.update import plot_update_rank, update_rank  # noqa: E402

__all__ = [
    "MEASURES",
    "anchor_by_width",
    "anchor_fidelity",
    "anchor_horizon",
    "causal_share",
    "explore_state",
    "gain_fidelity",
    "join_seeds",
    "measure",
    "perturbation_growth",
    "plot",
    "plot_anchor_by_width",
    "plot_anchor_fidelity",
    "plot_anchor_horizon",
    "plot_causal_share",
    "plot_gain_fidelity",
    "plot_perturbation_growth",
    "plot_readback",
    "plot_readout",
    "plot_residual_decay",
    "plot_solver_fidelity",
    "plot_spectrum",
    "plot_state",
    "plot_state_rank",
    "plot_step_cosines",
    "plot_transition",
    "plot_update_rank",
    "readback",
    "readout",
    "residual_decay",
    "save",
    "solver_fidelity",
    "state_rank",
    "step_cosines",
    "transition",
    "update_rank",
    "window_rank",
]
