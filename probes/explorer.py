"""The state at one token: matrix, spectrum and what the token added; a static figure and a slider over
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from probes import _factors, _figures, rank
from probes.update import update_factors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure


@dataclass(frozen=True)
class _View:
    """What the panels show, for one sequence, layer and head."""

    at: list[int]
    states: np.ndarray  # [P, K, V]
    spectra: np.ndarray  # [P, M]
    updates: np.ndarray  # [P, R], singular values of S_t - alpha_t S_{t-1}
    tokens: list[int]
    where: str


def plot_state(
    model: Any,
    inputs: Int[Tensor, "B T"],
    token: int = -1,
    *,
    layer: int = 0,
    head: int = 0,
    sample: int = 0,
    figure: Figure | None = None,
) -> Figure:
    """Three panels for the state after one token: S_t^T (key by value), its singular values, and the token's
    update's.

    The static twin of `explore_state`. Draws into `figure` where given; the width is that of two columns
    (6.75 inches).
    """
    view = _view(model, inputs, [token], layer, head, sample)
    return _draw(view, 0, figure)


def explore_state(
    model: Any,
    inputs: Int[Tensor, "B T"],
    *,
    layer: int = 0,
    head: int = 0,
    sample: int = 0,
    at: Sequence[int] | None = None,
) -> Any:
    """A widget for notebooks: slide over the tokens `at` (default: up to 128) and see what `plot_state`
    shows.

    States are replayed once, when the widget is made. Colour and axis ranges stay fixed over the slide. Needs
    ipywidgets.
    """
    try:
        import ipywidgets
    except ImportError as error:
        raise ImportError(
            "explore_state needs ipywidgets: pip install 'prism-lab[notebooks]'; or plot_state"
        ) from error
    from IPython.display import display

    at = _factors.positions(at, inputs.shape[1], 128)
    view = _view(model, inputs, at, layer, head, sample)
    slider = ipywidgets.SelectionSlider(options=[(str(t), i) for i, t in enumerate(at)], description="token")
    out = ipywidgets.Output()

    def show(change: Any = None) -> None:
        import matplotlib.pyplot as plt

        figure = _draw(view, slider.value)
        with out:
            out.clear_output(wait=True)
            display(figure)
        plt.close(figure)

    slider.observe(show, names="value")
    show()
    return ipywidgets.VBox([slider, out])


@torch.no_grad()
def _view(model: Any, inputs: Tensor, at: Sequence[int], layer: int, head: int, sample: int) -> _View:
    if not -len(inputs) <= sample < len(inputs):
        raise ValueError(f"sample: expected -{len(inputs)}..{len(inputs) - 1}, got {sample}")
    one = inputs[sample][None]
    at = _factors.positions(at, one.shape[1])
    wanted = layer % len(model.blocks) if -len(model.blocks) <= layer < len(model.blocks) else layer
    found = {f.layer: f for f in _factors.layers(model, one)}
    if wanted not in found:
        raise ValueError(f"layer: expected one of {', '.join(map(str, found))}, got {layer}")
    f = found[wanted]
    heads = f.v.shape[2]
    if not -heads <= head < heads:
        raise ValueError(f"head: expected -{heads}..{heads - 1}, got {head}")
    states = f.states(at)[0, :, head]
    left, right, _ = update_factors(f, "update")
    updates = rank.factor_singular_values(left[0, at, head], right[0, at, head])
    spectra = rank.matrix_singular_values(states)
    where = f"layer {wanted}, head {head % heads}, sequence {sample % len(inputs)}"
    shown_states, shown_spectra, shown_updates = (x.float().cpu().numpy() for x in (states, spectra, updates))
    return _View(at, shown_states, shown_spectra, shown_updates, [int(x) for x in one[0, at]], where)


def _draw(view: _View, i: int, figure: Figure | None = None) -> Figure:
    import matplotlib.pyplot as plt

    if figure is None:
        figure = plt.figure(figsize=(2 * _figures.WIDTH + 0.25, 2.3), layout="constrained")
    field, spectrum, update = figure.subplots(1, 3, width_ratios=(1.25, 1, 0.8))
    limit = float(np.abs(view.states).max()) or 1.0
    image = field.imshow(view.states[i], vmin=-limit, vmax=limit, cmap="viridis", aspect="auto")
    for axis in (field.xaxis, field.yaxis):
        axis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(image, ax=field)
    bar.ax.tick_params(labelsize=_figures.FONT - 1)
    _figures.new_axes(field)
    _figures.finish(
        field, "value component", "key component", f"$S_t$, t = {view.at[i]} (input {view.tokens[i]})"
    )

    values, top = view.spectra[i], float(view.spectra.max()) or 1.0
    _figures.new_axes(spectrum)
    spectrum.plot(np.arange(1, len(values) + 1), np.maximum(values, 1e-6 * top), **_figures.look(0))
    spectrum.set_yscale("log")
    spectrum.set_ylim(0.7e-6 * top, 1.5 * top)
    kept = rank.rank_measures(torch.from_numpy(values)[None], 0.0)["effective"].item()
    _figures.finish(spectrum, "$i$", r"$\sigma_i(S_t)$", f"effective rank {kept:.2f}")

    values, top = view.updates[i], float(view.updates.max()) or 1.0
    _figures.new_axes(update)
    update.bar(np.arange(1, len(values) + 1), values, color=_figures.COLOURS[1], width=0.6)
    update.set_xticks(np.arange(1, len(values) + 1))
    update.set_ylim(0, 1.05 * top)
    kept = rank.rank_measures(torch.from_numpy(values)[None], 0.0)["effective"].item()
    _figures.finish(update, "$i$", r"$\sigma_i(S_t - \alpha_t S_{t-1})$", f"effective rank {kept:.2f}")
    figure.suptitle(view.where, fontsize=_figures.FONT)
    return figure
