"""A grid over (task, arm, seed), and the cells it stands for.

An arm is a named PrismConfig; its vocabulary is the task's, so `vocab_size` is filled in per task. A grid can
be written in Python or read from a YAML, TOML or JSON file:

    tasks: {xor: {length: 32}, long_xor: {task: xor, length: 64}}
    arms:
      prism: {preset: prism, d_model: 32}
      token: {base: prism, anchor: token}
      gdn: {base: prism, n_refine: 0}
      wide_gdn: {base: gdn, match_parameters: prism}
    seeds: [0, 1, 2, 3, 4, 5]
    train: {steps: 500, batch_size: 32}
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import tasks
from ablations import store
from prism import PrismConfig, PrismModel
from tasks import Task

_ANY_VOCABULARY = 2


@dataclass(frozen=True)
class TrainSettings:
    """How a cell is trained: AdamW with linear warm-up and cosine decay, gradients clipped per model."""

    steps: int = 500
    batch_size: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    final_fraction: float = 0.0  # of the learning rate, where the cosine ends: one step after the last
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0  # largest gradient norm of one model; 0: no clipping
    eval_every: int = 50
    val_size: int = 256
    test_size: int = 1024
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("steps", "batch_size", "eval_every", "val_size", "test_size"):
            if not _is_int(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {getattr(self, name)!r}")
        if not _is_int(self.warmup_steps) or self.warmup_steps < 0:
            raise ValueError(f"warmup_steps: expected an integer of at least 0, got {self.warmup_steps!r}")
        for name in ("learning_rate", "eps"):
            if not _is_number(getattr(self, name)) or not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)!r}")
        for name in ("weight_decay", "clip", "final_fraction"):
            if not _is_number(getattr(self, name)) or not getattr(self, name) >= 0:
                raise ValueError(f"{name}: expected a number of at least 0, got {getattr(self, name)!r}")
        if len(self.betas) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {self.betas!r}")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype: expected 'float32' or 'float64', got {self.dtype!r}")
        # 1 and 1.0 are one setting and must give a cell one name.
        for name in ("learning_rate", "eps", "weight_decay", "clip", "final_fraction"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "betas", tuple(float(beta) for beta in self.betas))


@dataclass(frozen=True)
class Cell:
    """One model to train: an arm on a task from a seed. `role`: "report" or "selection"."""

    task: str
    arm: str
    seed: int
    role: str
    task_name: str
    task_params: Mapping[str, Any]
    model: PrismConfig
    train: TrainSettings

    def configuration(self) -> dict[str, Any]:
        """The canonical configuration that names the cell: all that decides its numbers but the hardware."""
        task = _task(self.task_name, store.canonical_json(self.task_params))
        return {
            "task": {"name": task.name, "version": task.version, "params": dict(task.params)},
            "model": self.model.to_dict(),
            "train": {**dataclasses.asdict(self.train), "betas": list(self.train.betas)},
            "seed": self.seed,
        }

    def labels(self) -> dict[str, Any]:
        """The names the grid gives the cell; they are not part of its identity."""
        return {"task": self.task, "arm": self.arm, "seed": self.seed, "role": self.role}

    def make_task(self) -> Task:
        """The task object of this cell."""
        return _task(self.task_name, store.canonical_json(self.task_params))


@dataclass(frozen=True)
class Grid:
    """Tasks x arms x seeds.

    tasks: label -> parameters; a `task` entry names the task where the label does not.
    arms: name -> PrismConfig, or a mapping of its fields with `preset` or `base` (an arm named before) and
        `match_parameters` (an arm whose parameter count is reached by widening d_model).
    seeds: of the reported cells; seed s draws both the initial weights and the data stream of its model.
    train: TrainSettings or a mapping of its fields.
    overrides: mappings with optional `task` and `arm` (to match) and fields of TrainSettings; later ones win.
    learning_rates, selection_seeds: where given, every arm first trains on the selection seeds at each
        learning rate, and the reported cells use the one with the best mean validation accuracy (ties: the
        lower validation loss).
    """

    tasks: Mapping[str, Mapping[str, Any]]
    arms: Mapping[str, PrismConfig | Mapping[str, Any]]
    seeds: Sequence[int]
    train: TrainSettings | Mapping[str, Any] = field(default_factory=TrainSettings)
    overrides: Sequence[Mapping[str, Any]] = ()
    learning_rates: Sequence[float] = ()
    selection_seeds: Sequence[int] = ()

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if isinstance(self.train, Mapping):
            set_(self, "train", _settings("train", TrainSettings(), self.train))
        set_(self, "tasks", {str(label): dict(params or {}) for label, params in self.tasks.items()})
        set_(self, "arms", dict(self.arms))
        set_(self, "seeds", _seeds("seeds", self.seeds))
        set_(self, "selection_seeds", _seeds("selection_seeds", self.selection_seeds))
        set_(self, "learning_rates", tuple(float(rate) for rate in self.learning_rates))
        set_(self, "overrides", tuple(dict(override) for override in self.overrides))
        for name in ("tasks", "arms"):
            if not getattr(self, name):
                raise ValueError(f"{name}: expected at least one entry, got none")
        if not self.seeds and not self.selection_seeds:
            raise ValueError("seeds: expected at least one seed, got none")
        if bool(self.learning_rates) != bool(self.selection_seeds):
            raise ValueError("learning_rates and selection_seeds: expected both or neither")
        both = sorted(set(self.seeds) & set(self.selection_seeds))
        if both:
            raise ValueError(f"selection_seeds: expected seeds that are not reported, got {both} in both")
        for override in self.overrides:
            self._check_override(override)
        self._refuse_duplicates()

    def model(self, arm: str, task: str) -> PrismConfig:
        """Configuration of an arm on a task: the task's vocabulary filled in, a matched width resolved."""
        base, matched = self._resolve(arm, ())
        config = base.replace(vocab_size=self.task(task).vocab_size)
        if matched is None:
            return config
        return match_parameters(config, count_parameters(self.model(matched, task)))

    def task(self, label: str) -> Task:
        """The task object behind a label."""
        name, params = self._task_spec(label)
        return _task(name, store.canonical_json(params))

    def settings(self, arm: str, task: str) -> TrainSettings:
        """Training settings of an arm on a task, the overrides applied in order."""
        settings = self._train
        for override in self.overrides:
            if override.get("task", task) == task and override.get("arm", arm) == arm:
                changes = {name: value for name, value in override.items() if name not in ("task", "arm")}
                settings = _settings("overrides", settings, changes)
        return settings

    def selection_cells(self) -> list[Cell]:
        """Cells that choose learning rates: every arm, task and rate, from the selection seeds."""
        return [
            self._cell(task, arm, seed, "selection", rate)
            for task in self.tasks
            for arm in self.arms
            for rate in self.learning_rates
            for seed in self.selection_seeds
        ]

    def report_cells(self, rates: Mapping[tuple[str, str], float] | None = None) -> list[Cell]:
        """Cells that are reported; `rates` maps (task, arm) to the chosen learning rate."""
        chosen = rates or {}
        return [
            self._cell(task, arm, seed, "report", chosen.get((task, arm)))
            for task in self.tasks
            for arm in self.arms
            for seed in self.seeds
        ]

    @property
    def _train(self) -> TrainSettings:
        assert isinstance(self.train, TrainSettings)  # since __post_init__
        return self.train

    def _cell(self, task: str, arm: str, seed: int, role: str, rate: float | None) -> Cell:
        name, params = self._task_spec(task)
        settings = self.settings(arm, task)
        if rate is not None:
            settings = dataclasses.replace(settings, learning_rate=rate)
        return Cell(task, arm, seed, role, name, params, self.model(arm, task), settings)

    def _task_spec(self, label: str) -> tuple[str, dict[str, Any]]:
        if label not in self.tasks:
            raise ValueError(f"task: expected one of {list(self.tasks)}, got {label!r}")
        params = dict(self.tasks[label])
        return str(params.pop("task", label)), params

    def _resolve(self, arm: str, seen: tuple[str, ...]) -> tuple[PrismConfig, str | None]:
        if arm not in self.arms:
            raise ValueError(f"arm: expected one of {list(self.arms)}, got {arm!r}")
        if arm in seen:
            raise ValueError(f"arms: {' -> '.join((*seen, arm))} refer to each other in a circle")
        given = self.arms[arm]
        if isinstance(given, PrismConfig):
            return given, None
        changes = dict(given)
        matched = changes.pop("match_parameters", None)
        base, preset = changes.pop("base", None), changes.pop("preset", None)
        if base is not None and preset is not None:
            raise ValueError(f"arms: {arm!r} has both a base and a preset; expected one")
        if matched is not None:
            self._resolve(matched, (*seen, arm))
        if base is not None:
            config, _ = self._resolve(base, (*seen, arm))
            return _replace(f"arms: {arm!r}", config, changes), matched
        changes.setdefault("vocab_size", _ANY_VOCABULARY)
        return PrismConfig.preset(preset or "prism", **changes), matched

    def _check_override(self, override: Mapping[str, Any]) -> None:
        for kind, known in (("task", self.tasks), ("arm", self.arms)):
            if override.get(kind, next(iter(known))) not in known:
                raise ValueError(
                    f"overrides: expected {kind} to be one of {list(known)}, got {override[kind]!r}"
                )
        _settings("overrides", self._train, {k: v for k, v in override.items() if k not in ("task", "arm")})

    def _refuse_duplicates(self) -> None:
        for task in self.tasks:
            seen: dict[str, str] = {}
            for arm in self.arms:
                key = store.canonical_json(
                    {"model": self.model(arm, task).to_dict(), "train": repr(self.settings(arm, task))}
                )
                if key in seen:
                    raise ValueError(
                        f"arms: {seen[key]!r} and {arm!r} are the same configuration on {task!r}"
                    )
                seen[key] = arm


def count_parameters(config: PrismConfig) -> int:
    """Number of trainable scalars of the model that `config` describes."""
    return _sizes(config)[0]


def state_size(config: PrismConfig) -> int:
    """Floats of recurrent memory per sequence, over all layers (convolution tails not counted)."""
    return _sizes(config)[1]


def match_parameters(config: PrismConfig, target: int) -> PrismConfig:
    """`config` with the d_model (a multiple of its head count) whose parameter count is nearest to `target`.

    Head width follows d_model where the configuration leaves it to the default, so a wider model has a larger
    state: compare `state_size` as well. Raises ValueError where the model is larger than the target at its
    narrowest.
    """

    def at(multiple: int) -> PrismConfig:
        return config.replace(d_model=multiple * config.n_heads)

    low = high = 1
    if count_parameters(at(low)) > target:
        raise ValueError(
            f"match_parameters: expected at least {count_parameters(at(low))} parameters, got {target}"
        )
    while count_parameters(at(high)) < target:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if count_parameters(at(middle)) < target:
            low = middle
        else:
            high = middle
    return min(at(low), at(high), key=lambda candidate: abs(count_parameters(candidate) - target))


def load_grid(path: Path | str) -> Grid:
    """Read a grid from a .yaml, .yml, .toml or .json file. Unknown keys raise ValueError."""
    path = Path(path)
    text = path.read_text()
    if path.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise ImportError(
                "a YAML grid needs PyYAML (pip install pyyaml); TOML and JSON need nothing"
            ) from None
        found = yaml.safe_load(text)
    elif path.suffix == ".toml":
        import tomllib

        found = tomllib.loads(text)
    elif path.suffix == ".json":
        found = json.loads(text)
    else:
        raise ValueError(f"path: expected a .yaml, .yml, .toml or .json file, got {path.name!r}")
    return grid_from_mapping(found)


def parse_task(text: str) -> tuple[str, dict[str, Any]]:
    """("xor length=64", as a flag has it) -> (label, parameters); the label is the text itself."""
    name, params = _parse("task", text)
    return text.strip(), {"task": name, **params}


def parse_arm(text: str) -> tuple[str, dict[str, Any]]:
    """("prism anchor=token d_model=32", as a flag has it) -> (label, preset and fields)."""
    name, fields = _parse("arm", text)
    return text.strip(), {"preset": name, **fields}


def from_flags(
    tasks_: Sequence[str],
    arms: Sequence[str],
    seeds: int,
    steps: int,
    batch_size: int,
    rates: Sequence[float],
) -> Grid:
    """The grid that `prism ablate`'s flags describe; several rates are chosen from with three other seeds."""
    for name, given in (("--task", tasks_), ("--arm", arms)):
        if not given:
            raise ValueError(f"{name}: expected at least one (or a grid file), got none")
    several = len(rates) > 1
    return Grid(
        tasks=dict(map(parse_task, tasks_)),
        arms=dict(map(parse_arm, arms)),
        seeds=range(seeds),
        train=TrainSettings(
            steps=steps,
            batch_size=batch_size,
            learning_rate=rates[0],
            warmup_steps=steps // 10,
            eval_every=max(1, steps // 20),
        ),
        learning_rates=rates if several else (),
        selection_seeds=range(seeds, seeds + 3) if several else (),
    )


def _parse(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    words = text.split()
    if not words or any("=" not in word for word in words[1:]) or "=" in words[0]:
        raise ValueError(f"{kind}: expected 'NAME key=value key=value ...', got {text!r}")
    found = {}
    for word in words[1:]:
        key, value = word.split("=", 1)
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value  # a plain word: no quotes needed around names
    return words[0], found


def grid_from_mapping(found: Any) -> Grid:
    """A Grid from plain mappings and lists, as a grid file holds them."""
    if not isinstance(found, Mapping):
        raise ValueError(f"grid: expected a mapping with tasks, arms and seeds, got {type(found).__name__}")
    known = [item.name for item in dataclasses.fields(Grid)]
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ValueError(f"grid: expected keys among {known}, got {unknown}")
    missing = [name for name in ("tasks", "arms", "seeds") if name not in found]
    if missing:
        raise ValueError(f"grid: expected the keys tasks, arms and seeds, {missing} missing")
    return Grid(**found)


@lru_cache(maxsize=256)
def _task(name: str, params: str) -> Task:
    return tasks.get(name, **json.loads(params))


@lru_cache(maxsize=1024)
def _sizes(config: PrismConfig) -> tuple[int, int]:
    model = PrismModel(config, seed=0)
    return model.num_parameters(), model.state_size()[0]


def _settings(where: str, base: TrainSettings, changes: Mapping[str, Any]) -> TrainSettings:
    return _replace(where, base, changes)


def _replace(where: str, base: Any, changes: Mapping[str, Any]) -> Any:
    known = [item.name for item in dataclasses.fields(base)]
    unknown = sorted(set(changes) - set(known))
    if unknown:
        raise ValueError(f"{where}: expected fields among {known}, got {unknown}")
    return dataclasses.replace(base, **changes)


def _seeds(name: str, seeds: Iterable[int]) -> tuple[int, ...]:
    found = tuple(seeds)
    for seed in found:
        if not _is_int(seed) or seed < 0:
            raise ValueError(f"{name}: expected integers of at least 0, got {seed!r}")
    if len(set(found)) != len(found):
        raise ValueError(f"{name}: expected different seeds, got {list(found)}")
    return found


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
