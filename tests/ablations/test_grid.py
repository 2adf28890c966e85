import json

import numpy as np
import pytest

from ablations import store
from ablations.grid import (
    Grid,
    TrainSettings,
    count_parameters,
    from_flags,
    grid_from_mapping,
    load_grid,
    match_parameters,
    parse_arm,
    parse_task,
    state_size,
)
from prism import PrismConfig, PrismModel

ARMS = {
    "prism": {"preset": "prism", "d_model": 8, "n_layers": 1},
    "token": {"base": "prism", "anchor": "token"},
    "gdn": {"base": "prism", "n_refine": 0},
    "wide": {"base": "gdn", "match_parameters": "prism"},
}
TASKS = {"xor": {"length": 16}, "recall": {"task": "mqar", "length": 16, "pairs": 2, "vocab_size": 24}}


def grid(**changes):
    return Grid(**{"tasks": TASKS, "arms": ARMS, "seeds": range(2), "train": {"steps": 10}, **changes})


def test_cells_of_a_grid():
    cells = grid().report_cells()
    assert len(cells) == 2 * 4 * 2
    assert len({store.cell_key(cell.configuration()) for cell in cells}) == len(cells)
    token = next(cell for cell in cells if cell.arm == "token" and cell.task == "recall")
    assert token.model == PrismConfig.preset("prism", vocab_size=24, d_model=8, n_layers=1, anchor="token")
    assert token.make_task().name == "mqar"
    assert token.configuration()["task"]["params"]["pairs"] == 2
    json.dumps(token.configuration())


def test_arms_as_prism_configs_take_the_vocabulary_of_the_task():
    made = grid(arms={"a": PrismConfig(vocab_size=999, d_model=8)})
    assert made.model("a", "xor").vocab_size == 32
    assert made.model("a", "recall").vocab_size == 24


def test_widened_arm_matches_parameters_on_every_task():
    made = grid()
    for task in TASKS:
        wide, target = made.model("wide", task), made.model("prism", task)
        assert wide.n_refine == 0
        assert wide.d_model > target.d_model
        step = count_parameters(wide.replace(d_model=wide.d_model + 1)) - count_parameters(wide)
        assert abs(count_parameters(wide) - count_parameters(target)) <= step / 2 + 1
        assert state_size(wide) > state_size(target)


def test_counts_are_those_of_the_model():
    config = PrismConfig(vocab_size=10, d_model=16, n_heads=2, n_value_heads=4, expand_v=2.0)
    model = PrismModel(config, seed=0)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())
    assert state_size(config) == 2 * 4 * 8 * 16


def test_match_parameters_refuses_what_cannot_be_reached():
    with pytest.raises(ValueError, match="match_parameters: expected at least"):
        match_parameters(PrismConfig(vocab_size=100), 50)


def test_overrides_apply_in_order_to_what_they_name():
    made = grid(overrides=[{"task": "xor", "steps": 20}, {"task": "xor", "arm": "gdn", "learning_rate": 0.5}])
    assert made.settings("gdn", "xor").steps == 20
    assert made.settings("gdn", "xor").learning_rate == 0.5
    assert made.settings("prism", "xor").learning_rate == TrainSettings().learning_rate
    assert made.settings("gdn", "recall").steps == 10


def test_selection_uses_other_seeds():
    made = grid(learning_rates=[0.1, 0.2], selection_seeds=[7])
    assert len(made.selection_cells()) == 2 * 4 * 2
    assert {cell.seed for cell in made.selection_cells()} == {7}
    chosen = made.report_cells({("xor", "gdn"): 0.2})
    assert {c.train.learning_rate for c in chosen if (c.task, c.arm) == ("xor", "gdn")} == {0.2}
    with pytest.raises(ValueError, match=r"selection_seeds: expected seeds that are not reported, got \[1\]"):
        grid(learning_rates=[0.1], selection_seeds=[1, 7])
    with pytest.raises(ValueError, match="expected both or neither"):
        grid(learning_rates=[0.1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": [0, 0]}, "seeds: expected different seeds"),
        ({"seeds": [-1]}, "seeds: expected integers of at least 0"),
        ({"seeds": []}, "seeds: expected at least one seed"),
        ({"tasks": {}}, "tasks: expected at least one entry"),
        ({"tasks": {"nonsense": {}}}, "expected a registered task"),
        ({"arms": {"a": {"preset": "gdn", "d_modell": 8}}}, "expected a known field"),
        (
            {"arms": {**ARMS, "b": {"base": "gdn", "d_modell": 8}}},
            r"arms: 'b': expected fields among .* \['d_modell'\]",
        ),
        ({"arms": {**ARMS, "again": {"base": "gdn"}}}, "'gdn' and 'again' are the same configuration"),
        ({"arms": {"a": {"base": "b"}, "b": {"base": "a"}}}, "a -> b -> a refer to each other"),
        ({"arms": {"a": {"base": "missing"}}}, "arm: expected one of"),
        ({"arms": {**ARMS, "b": {"base": "gdn", "preset": "gdn"}}}, "both a base and a preset"),
        ({"train": {"step": 3}}, r"train: expected fields among .* \['step'\]"),
        ({"overrides": [{"arm": "nobody", "steps": 3}]}, "overrides: expected arm to be one of"),
        ({"overrides": [{"stepz": 3}]}, "overrides: expected fields among"),
    ],
)
def test_bad_grids_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        grid(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0}, {"steps": 1.5}, {"steps": True}, {"learning_rate": 0}, {"learning_rate": float("nan")},
        {"weight_decay": -1}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}, {"dtype": "float16"},
        {"warmup_steps": -1},
        {"clip": -0.1}, {"eval_every": 0},
    ],
)  # fmt: skip
def test_bad_settings_are_refused(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))}: expected"):
        TrainSettings(**changes)


def test_whole_numbers_name_the_same_cell():
    def keys(train):
        cells = grid(train=train).report_cells()
        return [store.cell_key(cell.configuration()) for cell in cells]

    whole = {"learning_rate": 1, "clip": 1, "weight_decay": 0, "final_fraction": 0, "betas": [0, 0.9]}
    assert keys(whole) == keys({name: np.array(value, float).tolist() for name, value in whole.items()})


def test_grid_files(tmp_path):
    content = {"tasks": TASKS, "arms": ARMS, "seeds": [0, 1], "train": {"steps": 10}}
    (tmp_path / "g.json").write_text(json.dumps(content))
    (tmp_path / "g.toml").write_text(
        'seeds = [0, 1]\n[tasks.xor]\nlength = 16\n[tasks.recall]\ntask = "mqar"\nlength = 16\npairs = 2\n'
        'vocab_size = 24\n[train]\nsteps = 10\n[arms.prism]\npreset = "prism"\nd_model = 8\nn_layers = 1\n'
        '[arms.token]\nbase = "prism"\nanchor = "token"\n[arms.gdn]\nbase = "prism"\nn_refine = 0\n'
        '[arms.wide]\nbase = "gdn"\nmatch_parameters = "prism"\n'
    )
    expected = [cell.configuration() for cell in grid().report_cells()]
    for name in ("g.json", "g.toml"):
        assert [cell.configuration() for cell in load_grid(tmp_path / name).report_cells()] == expected
    with pytest.raises(ValueError, match=r"expected a \.yaml"):
        load_grid(__file__)


def test_yaml_grids_are_read_safely(tmp_path):
    yaml = pytest.importorskip("yaml")
    path = tmp_path / "g.yaml"
    path.write_text("tasks: {xor: {length: 16}}\narms: {gdn: {preset: gdn}}\nseeds: [0]\n")
    assert len(load_grid(path).report_cells()) == 1
    path.write_text("tasks: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(yaml.YAMLError):
        load_grid(path)


def test_grid_mappings_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"grid: expected keys among .* got \['sedes'\]"):
        grid_from_mapping({"tasks": {}, "arms": {}, "sedes": []})
    with pytest.raises(ValueError, match=r"\['seeds'\] missing"):
        grid_from_mapping({"tasks": {}, "arms": {}})
    with pytest.raises(ValueError, match="expected a mapping"):
        grid_from_mapping([1])


def test_flags():
    assert parse_task("mqar pairs=2 length=16") == (
        "mqar pairs=2 length=16",
        {"task": "mqar", "pairs": 2, "length": 16},
    )
    assert parse_arm("prism anchor=token output_gate=false")[1] == {
        "preset": "prism", "anchor": "token", "output_gate": False,
    }  # fmt: skip
    made = from_flags(["xor length=16"], ["gdn d_model=8", "prism d_model=8"], 2, 30, 4, [0.01, 0.02])
    assert made.selection_seeds == (2, 3, 4)
    assert made.train.warmup_steps == 3
    for bad in ("", "a=1", "prism anchor"):
        with pytest.raises(ValueError, match="arm: expected 'NAME key=value"):
            parse_arm(bad)
    with pytest.raises(ValueError, match="--arm: expected at least one"):
        from_flags(["xor"], [], 1, 1, 1, [0.1])
