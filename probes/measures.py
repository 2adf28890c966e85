"""Every measure by name, for the command line and for sweeps."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xarray as xr
from jaxtyping import Int
from torch import Tensor

from probes import anchor, causal, fidelity, memory, perturbation, readout, residual, state, update

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Measure:
    """run(model, inputs, **options) -> Dataset; plot(Dataset, ax=None, **options) -> Axes."""

    run: Callable[..., xr.Dataset]
    plot: Callable[..., Any]

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.run) or "").split("\n\n", 1)[0].replace("\n", " ")

    @property
    def needs(self) -> tuple[str, ...]:
        """Arguments beside model and inputs that have no default: targets, labels."""
        parameters = list(inspect.signature(self.run).parameters.values())[2:]
        return tuple(p.name for p in parameters if p.default is p.empty)


MEASURES = {
    "update_rank": Measure(update.update_rank, update.plot_update_rank),
    "state_rank": Measure(state.state_rank, state.plot_state_rank),
    "window_rank": Measure(state.window_rank, state.plot_state_rank),
    "residual_decay": Measure(residual.residual_decay, residual.plot_residual_decay),
    "step_cosines": Measure(residual.step_cosines, residual.plot_step_cosines),
    "anchor_fidelity": Measure(anchor.anchor_fidelity, anchor.plot_anchor_fidelity),
    "anchor_horizon": Measure(anchor.anchor_horizon, anchor.plot_anchor_horizon),
    "gain_fidelity": Measure(fidelity.gain_fidelity, fidelity.plot_gain_fidelity),
    "solver_fidelity": Measure(fidelity.solver_fidelity, fidelity.plot_solver_fidelity),
    "transition": Measure(memory.transition, memory.plot_transition),
    "readback": Measure(memory.readback, memory.plot_readback),
    "perturbation_growth": Measure(perturbation.perturbation_growth, perturbation.plot_perturbation_growth),
    "readout": Measure(readout.readout, readout.plot_readout),
    "causal_share": Measure(causal.causal_share, causal.plot_causal_share),
}


def measure(model: Any, inputs: Int[Tensor, "B T"], name: str, **options: Any) -> xr.Dataset:
    """MEASURES[name].run(model, inputs, **options).

    Raises ValueError for an unknown name, an unknown option, or one that is missing (`targets` for
    causal_share, `labels` for readout), and what the measure itself raises.
    """
    found = _find(name)
    known = list(inspect.signature(found.run).parameters)[2:]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"options: {name} takes {', '.join(known) or 'none'}, got {', '.join(unknown)}")
    missing = [option for option in found.needs if option not in options]
    if missing:
        raise ValueError(f"options: {name} needs {', '.join(missing)}, got {', '.join(options) or 'none'}")
    return found.run(model, inputs, **options)


def join_seeds(datasets: Sequence[xr.Dataset], seeds: Sequence[int] | None = None) -> xr.Dataset:
    """Results of one measure on models that differ in their seed, along a new first dimension `seed`.

    Nothing is averaged, also not what exists once per model (R^2, fits, half-lives); every plot takes the
    result. causal_share needs no joining: it takes the models themselves.

    Raises ValueError for no datasets, or for ones of different sizes or definitions.
    """
    if not datasets:
        raise ValueError("datasets: expected at least one, got none")
    first = datasets[0]
    for other in datasets[1:]:
        if dict(other.sizes) != dict(first.sizes) or other.attrs != first.attrs:
            came, wanted = ((dict(ds.sizes), ds.attrs) for ds in (other, first))
            raise ValueError(
                f"datasets: expected the sizes and attributes of the first, {wanted}, got {came}"
            )
    label = xr.Variable("seed", list(range(len(datasets)) if seeds is None else seeds))
    return xr.concat(datasets, dim=label, data_vars="all", coords="minimal", compat="override", join="exact")


def plot(ds: xr.Dataset, name: str, ax: Axes | None = None, **options: Any) -> Axes:
    """The figure of the measure `name`, from what `measure` returned."""
    return _find(name).plot(ds, ax, **options)


def _find(name: str) -> Measure:
    if name not in MEASURES:
        near = difflib.get_close_matches(name, MEASURES, n=3, cutoff=0.4)
        hint = f"; close: {', '.join(near)}" if near else ""
        raise ValueError(f"name: expected one of {', '.join(MEASURES)}, got {name!r}{hint}")
    return MEASURES[name]
