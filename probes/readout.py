"""Measure 8: can a hidden variable of the task be read out linearly, where, and from which layer on?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from probes import _factors, _figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SOURCES = {"state": "mixer.state", "mixer": "mixer_out", "residual": "resid_post"}
IGNORE = -100
_PIECE_BYTES = 1 << 28
_FEWEST = 8  # labels to fit on, and to score


@torch.no_grad()
def readout(
    model: Any,
    inputs: Int[Tensor, "B T"],
    labels: Int[Tensor, "B T"],
    *,
    sources: Sequence[str] = ("state", "mixer", "residual"),
    at: Sequence[int] | Tensor | None = None,
    untrained: Any | None = None,
    control_window: int = 3,
    max_features: int = 1024,
    seed: int = 0,
) -> xr.Dataset:
    """Accuracy of a linear classifier of labels[:, t] from the state, the mixer's output or the residual
    stream at token t.

    labels: the hidden variable at every token (running parity, the group element, the bound value), -100
    where there is none. Logistic regression (scikit-learn, C = 1, standardised features) is fitted on the
    even sequences and scored on the odd ones, at each of the tokens `at` (default: up to 8 of those that have
    at least 8 labels in either half). States with more than max_features entries go through one fixed
    Gaussian projection to that many (Johnson & Lindenstrauss).

    A read-out shows that the variable is there only beside its controls:
        control     the same classifier on random labels with as many classes, a fixed function of the last
                    control_window tokens (Hewitt & Liang 2019): what the classifier can fit of what any state
                    that remembers those tokens holds. accuracy - control is their selectivity.
        untrained   the same classifier on `untrained`, a model of the same configuration with its initial
                    weights.
        majority    the most frequent label of the training half.

    Returns accuracy (dims weights, label, source, layer, token; label hidden, control), its 95 % Wilson
    interval (edge), majority and answers (label, token), the number of labels scored. Accuracy is NaN where
    the training half has fewer than two classes or a half has fewer than 8 labels.

    Raises ValueError for unknown sources, labels of another shape or of fewer than 2 classes, and where no
    token has enough labels.
    """
    unknown = [s for s in sources if s not in SOURCES]
    if unknown or not sources:
        raise ValueError(f"sources: expected some of {', '.join(SOURCES)}, got {list(sources)}")
    if labels.shape != inputs.shape:
        raise ValueError(
            f"labels: expected the shape of inputs {list(inputs.shape)}, got {list(labels.shape)}"
        )
    inputs, labels = inputs.cpu(), labels.cpu()
    at = _labelled(labels) if at is None else _factors.positions(at, inputs.shape[1])
    targets = {"hidden": labels, "control": control_labels(inputs, labels, control_window, seed)}
    models = {"trained": model} | ({} if untrained is None else {"untrained": untrained})
    layers = range(len(model.blocks))
    shape = (len(models), len(targets), len(sources), len(layers), len(at))
    score, bounds = np.full(shape, np.nan), np.full((*shape, 2), np.nan)
    majority = np.full((len(targets), len(at)), np.nan)
    answers = np.stack([(wanted[1::2, at] != IGNORE).sum(0).numpy() for wanted in targets.values()])
    for m, one in enumerate(models.values()):
        features = _features(one, inputs, sources, at, max_features, seed)
        for (source, l), found in features.items():
            for k, wanted in enumerate(targets.values()):
                for p, t in enumerate(at):
                    hits, n, base = _fit(found[:, p], wanted[:, t].numpy())
                    majority[k, p] = base
                    if n:
                        place = (m, k, list(sources).index(source), l, p)
                        score[place] = hits / n
                        bounds[place] = _wilson(hits, n)
    dims = ("weights", "label", "source", "layer", "token")
    return xr.Dataset(
        {
            "accuracy": (dims, score),
            "interval": ((*dims, "edge"), bounds),
            "majority": (("label", "token"), majority),
            "answers": (("label", "token"), answers),
        },
        coords={
            "weights": list(models),
            "label": list(targets),
            "source": list(sources),
            "layer": list(layers),
            "token": at,
            "edge": ["low", "high"],
        },
        attrs={
            "classifier": "LogisticRegression(C=1), standardised; fitted on even, scored on odd sequences",
            "control_window": control_window,
            "n_sequences": inputs.shape[0],
        },
    )


def control_labels(
    inputs: Int[Tensor, "B T"], labels: Int[Tensor, "B T"], window: int, seed: int
) -> Int[Tensor, "B T"]:
    """Random labels, a function of the last `window` tokens alone, with the classes of labels; -100 where
    labels are.
    """
    if window < 1:
        raise ValueError(f"control_window: expected at least 1, got {window}")
    classes = labels[labels != IGNORE].unique()
    if len(classes) < 2:
        raise ValueError(f"labels: expected at least 2 classes beside -100, got {classes.tolist()}")
    padded = torch.cat([inputs.new_full((inputs.shape[0], window - 1), -1), inputs], 1)
    grams = padded.unfold(1, window, 1).reshape(-1, window)
    _, kind = grams.unique(dim=0, return_inverse=True)
    generator = torch.Generator().manual_seed(seed)
    table = classes[torch.randint(len(classes), (int(kind.max()) + 1,), generator=generator)]
    return torch.where(labels != IGNORE, table[kind].view_as(labels), IGNORE)


def plot_readout(ds: xr.Dataset, ax: Axes | None = None, *, token: int | None = None) -> Axes:
    """Accuracy by layer (at one token; default the last that has one) of each source, with its control
    (hollow) and the majority class.
    """
    ax = _figures.new_axes(ax)
    if token is None:
        hidden = ds.accuracy.sel(label="hidden")
        scored = hidden.notnull().any([dim for dim in hidden.dims if dim != "token"])
        if not scored.any():
            raise ValueError("ds: expected an accuracy at one token at least, got none")
        token = int(ds.token[scored][-1])
    at = ds.sel(token=token)
    layers = ds.layer.values
    shift = np.linspace(-0.12, 0.12, ds.sizes["source"]) if ds.sizes["source"] > 1 else [0.0]
    for i, source in enumerate(ds.source.values):
        style = _figures.look(i)
        value = at.accuracy.sel(weights="trained", source=source)
        middle, low, high = _centre(at.sel(weights="trained", source=source, label="hidden"))
        error = [middle - low, high - middle]
        bars = ax.errorbar(layers + shift[i], middle, np.maximum(error, 0), capsize=1.5, **style)
        bars.lines[0].set_label(source)
        hollow = style | {"markerfacecolor": "w", "linewidth": 0.7}
        ax.plot(layers + shift[i], _figures.median(value.sel(label="control"), "layer"), **hollow)
        if "untrained" in ds.weights.values:
            faint = style | {"linestyle": "none", "alpha": 0.45, "markersize": 4.5}
            values = at.accuracy.sel(weights="untrained", source=source, label="hidden")
            ax.plot(layers + shift[i], _figures.median(values, "layer"), **faint)
    ax.plot([], [], "o", color="0.3", markerfacecolor="w", markersize=3, label="control (hollow)")
    if "untrained" in ds.weights.values:
        ax.plot([], [], "o", color="0.3", alpha=0.45, markersize=4.5, label="untrained (faint)")
    _figures.reference(ax, float(at.majority.sel(label="hidden").mean()), "majority")
    ax.set_xticks(layers)
    ax.set_ylim(top=1.03, auto=None)  # the bottom stays automatic
    seeds = f"{ds.sizes['seed']} seeds, " if "seed" in ds.sizes else ""
    answers = int(at.answers.sel(label="hidden").min())
    title = f"token {int(at.token)}, n = {seeds}{answers} test answers"
    _figures.finish(ax, "layer", "read-out accuracy", title, legend=False)
    _figures.legend_below(ax, 3)
    return ax


def _centre(at: xr.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By layer: accuracy and its interval for one model; median, lowest and highest for several seeds."""
    if "seed" in at.accuracy.dims:
        return (
            at.accuracy.median("seed").values,
            at.accuracy.min("seed").values,
            at.accuracy.max("seed").values,
        )
    return at.accuracy.values, at.interval.sel(edge="low").values, at.interval.sel(edge="high").values


def _features(
    model: Any, inputs: Tensor, sources: Sequence[str], at: list[int], limit: int, seed: int
) -> dict[tuple[str, int], np.ndarray]:
    """(source, layer) -> [B, P, features], where the layer has such a tensor; the model runs once."""
    B, T = inputs.shape
    existing = model.hook_shapes(B, T)
    every = {(s, l): f"blocks.{l}.{SOURCES[s]}" for s in sources for l in range(len(model.blocks))}
    names = {place: name for place, name in every.items() if name in existing}
    tokens = inputs.to(next(model.parameters()).device)
    each = model.estimate_cache_bytes((1, T), list(names.values()), at)
    parts: dict[tuple[str, int], list[Tensor]] = {place: [] for place in names}
    for piece in tokens.split(max(1, min(256, _PIECE_BYTES // max(1, each)))):
        _, cache = model.run_with_cache(piece, names=list(names.values()), positions=at)
        for place, name in names.items():
            tensor = (cache[name] if place[0] == "state" else cache[name][:, at]).flatten(2).float()
            if tensor.shape[-1] > limit:
                generator = torch.Generator().manual_seed(seed)
                project = torch.randn(tensor.shape[-1], limit, generator=generator) / math.sqrt(limit)
                tensor = tensor @ project.to(tensor)
            parts[place].append(tensor.cpu())
    return {place: torch.cat(found).numpy() for place, found in parts.items()}


def _labelled(labels: Int[Tensor, "B T"]) -> list[int]:
    """Up to 8 tokens, evenly spread over those at which either half of the sequences has enough labels."""
    counts = torch.stack([(labels[half::2] != IGNORE).sum(0) for half in (0, 1)]).amin(0)
    enough = (counts >= _FEWEST).nonzero().flatten().tolist()
    if not enough:
        raise ValueError(
            f"labels: expected a token with at least {_FEWEST} labels in either half of the sequences, "
            f"got {int(counts.max())} at most; give more sequences"
        )
    return _figures.pick(enough, 8)


def _fit(features: np.ndarray, labels: np.ndarray) -> tuple[int, int, float]:
    """Right answers, answers, and the majority class's share on the test half."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train = (np.arange(len(labels)) % 2 == 0) & (labels != IGNORE)
    test = (np.arange(len(labels)) % 2 == 1) & (labels != IGNORE)
    if min(train.sum(), test.sum()) < _FEWEST:
        return 0, 0, np.nan
    classes, counts = np.unique(labels[train], return_counts=True)
    base = float((labels[test] == classes[counts.argmax()]).mean())
    if len(classes) < 2:
        return 0, 0, base
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200, tol=1e-3))
    with warnings.catch_warnings():  # 200 steps on separable data are not converged, and good enough
        warnings.simplefilter("ignore", ConvergenceWarning)
        classifier.fit(features[train], labels[train])
    return int((classifier.predict(features[test]) == labels[test]).sum()), int(test.sum()), base


def _wilson(hits: int, n: int) -> tuple[float, float]:
    from scipy.stats import binomtest

    found = binomtest(hits, n).proportion_ci(method="wilson")
    return found.low, found.high
