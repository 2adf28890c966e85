"""What the rows of a run support, in words.

An ingredient is credited only by a contrast: two arms of one task whose configurations differ in exactly one
field and whose training differs in the learning rate at most. The evidence is the paired difference of test
accuracy over the seeds that both arms share. Arms that differ in more are compared as mixers, with parameters
and state size, and credit nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pandas as pd

from ablations.statistics import Paired, equivalence_p, paired_difference

MARGIN = 0.02
"""Arms are alike where the interval of their difference and an equivalence test at SIGNIFICANCE keep it
inside +- this share of (ceiling - chance)."""
SIGNIFICANCE = 0.05

_ON_ORDER: dict[str, tuple[Any, ...]] = {
    "activation": ("identity", "tanh", "silu", "gelu"),
    "anchor": ("none", "token", "shortconv", "state"),
    "gain": ("one", "sigmoid", "learned"),
    "residual": ("keep", "subtract"),
    "residual_start": ("value", "value-anchor"),
    "refine_keys": ("base", "shared", "own"),
    "step_gate": ("sigmoid", "two_sigmoid", "raw"),
    "erase": ("none", "sigmoid", "two_sigmoid", "raw"),
    "decay": ("none", "sigmoid", "gdn"),
    "qkv_activation": ("identity", "silu"),
    "base_write": (False, True),
    "output_gate": (False, True),
    "refine_key_norm": (False, True),
    "qk_norm": (False, True),
}
_AT_CEILING = ", at the ceiling, where little could show"
_NAMES = {
    "n_refine": "the refinement as a whole: writes, anchor and its convolution",
    "activation": "the activation phi",
    "anchor": "the anchor",
    "anchor_width": "the anchor's width",
    "gain": "the learned gain",
    "residual": "subtracting the residual",
    "refine_keys": "keys of its own for each step",
    "short_conv": "the short convolution on q, k, v",
    "mlp_ratio": "the MLP",
    "output_gate": "the output gate",
    "erase": "the erase range",
    "decay": "the decay",
    "d_model": "the width",
    "n_layers": "depth",
}


@dataclass(frozen=True)
class Contrast:
    """Two arms of a task that differ in `field` alone; `arm` has more of it than `against`."""

    task: str
    field: str
    arm: str
    against: str
    value: Any
    value_against: Any

    @property
    def name(self) -> str:
        """The ingredient in words."""
        if (self.field, self.value, self.value_against) == ("anchor", "shortconv", "token"):
            return "the anchor's convolution"  # the token anchor is an anchor too, without earlier tokens
        return _NAMES.get(self.field, self.field)

    @property
    def ingredient(self) -> str:
        """The ingredient in words, with both settings."""
        return f"{self.name} ({self.field}: {self.value} against {self.value_against})"


@dataclass(frozen=True)
class Finding:
    """One comparison: verdict "raises", "lowers", "alike", "open" (not told apart) or "none" (no verdict),
    and words.

    `field` and `name` (the field in words) are empty for a comparison of mixers, which credits no ingredient.
    `at_ceiling`: alike, but where both arms are so near the ceiling that little could show.
    """

    task: str
    arm: str
    against: str
    field: str
    name: str
    verdict: str
    difference: Paired | None
    text: str
    at_ceiling: bool = False


def contrasts(rows: pd.DataFrame) -> list[Contrast]:
    """Every pair of arms that differs in one ingredient alone, per task, in the order of the rows."""
    found = []
    for task, of_task in _reported(rows).groupby("task", sort=False):
        configurations = _configurations(of_task)
        for first, second in combinations(configurations, 2):
            fields = _differing(configurations[first], configurations[second])
            if len(fields) != 1 or fields[0].startswith("train."):
                continue
            (field,) = fields
            pair = [(configurations[name][field], name) for name in (first, second)]
            (low, against), (high, arm) = sorted(pair, key=lambda item: _rank(field, item[0]))
            found.append(Contrast(str(task), field, arm, against, high, low))
    return found


def findings(rows: pd.DataFrame) -> list[Finding]:
    """All contrasts of a run with their verdicts; where the refinement is credited, who else gets there."""
    reported = _reported(rows)
    result = []
    for contrast in contrasts(rows):
        of_task = reported[reported["task"] == contrast.task]
        verdict, difference, words = _judge(of_task, contrast.arm, contrast.against)
        text = f"{contrast.ingredient}: {words}"
        names = (contrast.task, contrast.arm, contrast.against, contrast.field, contrast.name)
        result.append(Finding(*names, verdict, difference, text, _AT_CEILING in words))
        if contrast.field == "n_refine" and verdict == "raises":
            result += _rivals(of_task, contrast)
    return result


def headline(found: list[Finding]) -> list[str]:
    """The findings of one task in a few lines: what raises accuracy, lowers it, does nothing, is open."""
    credited = [finding for finding in found if finding.field]
    if credited and all(finding.verdict == "alike" for finding in credited):
        where = _AT_CEILING if all(finding.at_ceiling for finding in credited) else ""
        return [f"All arms that differ in one ingredient alone are alike{where}."]
    rivals = [f.against for f in found if not f.field and f.verdict in ("alike", "lowers")]
    lines = []
    alike = f"Alike with and without, within {MARGIN:.0%} of the way from chance to ceiling"
    for words, verdicts, at_ceiling in (
        ("Raises accuracy", ("raises",), False),
        ("Lowers accuracy", ("lowers",), False),
        (alike, ("alike",), False),
        (f"Alike{_AT_CEILING}", ("alike",), True),
        ("Not told apart", ("open", "none"), False),
    ):
        named = []
        for finding in credited:
            if finding.verdict in verdicts and finding.at_ceiling == at_ceiling:
                but = f" (but without it {' and '.join(rivals)} gets as far)" if rivals else ""
                refines = finding.field == "n_refine" and finding.verdict == "raises"
                named.append(finding.name + (but if refines else ""))
        if named:
            lines.append(f"{words}: {'; '.join(dict.fromkeys(named))}.")
    return lines


def sections(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Task -> its headline, then every finding on it."""
    found = findings(rows)
    result = {}
    for task in dict.fromkeys(_reported(rows)["task"]):
        of_task = [finding for finding in found if finding.task == task]
        result[str(task)] = [*headline(of_task), *(finding.text for finding in of_task)]
    return result


def multiplicity(found: list[Finding]) -> str:
    """How many verdicts chance alone would hand out among so many comparisons."""
    judged = sum(finding.verdict != "none" for finding in found)
    return (
        f"{judged} comparisons, each at {SIGNIFICANCE:.0%} and not corrected for their number: "
        f"chance alone would give up to about {judged * SIGNIFICANCE:.1f} 'raises' or 'lowers'."
    )


def _judge(of_task: pd.DataFrame, arm: str, against: str) -> tuple[str, Paired | None, str]:
    both = of_task.pivot(index="seed", columns="arm", values=["test_accuracy", "status"])
    pairs = both.dropna(subset=[("status", arm), ("status", against)])
    if pairs.empty:
        return "none", None, f"{arm} and {against} share no seed: no verdict."
    ok = (pairs[("status", arm)] == "ok") & (pairs[("status", against)] == "ok")
    if not ok.all():
        return "none", None, f"{(~ok).sum()} of {len(pairs)} pairs of {arm} and {against} failed: no verdict."
    values = [pairs[("test_accuracy", name)].to_numpy(dtype=float) for name in (arm, against)]
    difference = paired_difference(values[0], values[1])
    n, mean = difference.n, difference.value
    means = f"{arm} {values[0].mean():.3f}, {against} {values[1].mean():.3f}"
    if n == 1:
        return "none", difference, f"{means}; one seed has no interval: no verdict."
    span = of_task["ceiling"].iloc[0] - of_task["chance"].iloc[0]
    numbers = (
        f"{means}; difference {_signed(mean)} [{_signed(difference.low)}, {_signed(difference.high)}], "
        f"p = {difference.p_value:.2g}, n = {n} pairs"
    )
    if max(abs(difference.low), abs(difference.high)) <= MARGIN * span:
        p_alike = equivalence_p(values[0], values[1], MARGIN * span)
        if not p_alike <= SIGNIFICANCE:
            few = f"within {MARGIN:.0%} of each other, too few seeds to call them alike"
            return "open", difference, f"{few} ({numbers})."
        below = max(float(v.mean()) for v in values) < of_task["ceiling"].iloc[0] - MARGIN * span
        return "alike", difference, f"alike{'' if below else _AT_CEILING} ({numbers})."
    if difference.low > 0 or difference.high < 0:
        word = "raises" if mean > 0 else "lowers"
        if difference.p_value <= SIGNIFICANCE:
            return word, difference, f"{word} accuracy ({numbers})."
        count = difference.n_higher if mean > 0 else difference.n_lower
        side = "higher" if mean > 0 else "lower"
        return "open", difference, f"{side} in {count} of {n} seeds, too few to tell from chance ({numbers})."
    return "open", difference, f"not told apart ({numbers})."


def _rivals(of_task: pd.DataFrame, contrast: Contrast) -> list[Finding]:
    """Arms without refinement that are not behind the credited arm: what it does, they do by other means."""
    configurations = _configurations(of_task)
    sizes = {
        str(arm): f"{arm} has {first['parameters']:,} parameters and a state of {first['state_size']:,}"
        for arm, first in of_task.groupby("arm")[["parameters", "state_size"]].first().iterrows()
    }
    result = []
    for name, configuration in configurations.items():
        if name == contrast.against or configuration["n_refine"] != 0:
            continue
        verdict, difference, words = _judge(of_task, contrast.arm, name)
        fields = ", ".join(_differing(configurations[contrast.arm], configuration))
        size = f"{sizes[contrast.arm]}; {sizes[name]}"
        tail = {
            "alike": f" {name} has no refinement: the gap above is not evidence for the rank of the write.",
            "lowers": f" {name} has no refinement and does better.",
        }.get(verdict, "")
        pair = f"{contrast.arm} against {name} (mixers that differ in {fields})"
        text = f"{pair}: {words}{tail} {size}."
        result.append(Finding(contrast.task, contrast.arm, name, "", "", verdict, difference, text))
    return result


def _reported(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["role"] == "report"]


def _configurations(of_task: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Arm -> its model's fields and, as train.*, its training settings but the learning rate."""
    found = {}
    for arm, rows in of_task.groupby("arm", sort=False):
        if rows["model"].nunique() > 1:
            raise ValueError(
                f"rows: expected one configuration of arm {arm!r} a task, got {rows['model'].nunique()}"
            )
        train = json.loads(rows["train"].iloc[0])
        train.pop("learning_rate")
        found[str(arm)] = {
            **json.loads(rows["model"].iloc[0]),
            **{f"train.{name}": value for name, value in train.items()},
        }
    return found


def _differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    return [field for field in first if first[field] != second[field]]


def _rank(field: str, value: Any) -> float:
    """Position of a setting from "without" to "with"."""
    order = _ON_ORDER.get(field)
    if order is not None and value in order:
        return order.index(value)
    return float(value) if isinstance(value, (bool, int, float)) else 0.0


def _signed(value: float) -> str:
    return f"{round(value, 3) + 0.0:+.3f}"  # + 0.0: no "-0.000"
