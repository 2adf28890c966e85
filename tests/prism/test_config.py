import dataclasses
import json
import pickle

import pytest

from prism import PrismConfig
from prism.config import CHOICES, PRESETS


def test_unknown_field_is_named_with_close_ones():
    with pytest.raises(ValueError, match=r"expected a known field, came 'n_refines'; close names: n_refine"):
        PrismConfig(vocab_size=8, n_refines=2)
    with pytest.raises(ValueError, match="came 'decays'"):
        PrismConfig.preset("gdn", vocab_size=8, decays="none")
    with pytest.raises(ValueError, match="came 'anker'"):
        PrismConfig.from_dict({"vocab_size": 8, "anker": "token"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size: expected an integer >= 1, came 0"),
        ({"d_model": 16.0}, "d_model: expected an integer >= 1, came 16.0"),
        ({"n_layers": True}, "n_layers: expected an integer >= 1, came True"),
        ({"n_refine": -1}, "n_refine: expected an integer >= 0, came -1"),
        ({"n_heads": 3}, "n_heads: expected a divisor of d_model=64 or a head_dim, came 3"),
        ({"n_heads": 2, "n_value_heads": 3}, "n_value_heads: expected a multiple of n_heads=2, came 3"),
        ({"head_dim": 5, "expand_v": 1.5}, "expand_v: expected head_dim=5 times it to be whole, came 1.5"),
        ({"expand_v": float("nan")}, "expand_v: expected a finite number > 0, came nan"),
        ({"mlp_ratio": -1}, "mlp_ratio: expected a finite number >= 0, came -1"),
        ({"mlp_ratio": 1e-3}, "mlp_ratio: expected 0 or enough for a hidden unit at d_model=64, came 0.001"),
        ({"activation": "relu"}, "activation: expected one of gelu, silu, tanh, identity, came 'relu'"),
        ({"base_write": 1}, "base_write: expected True or False, came 1"),
        ({"scale": "1"}, "scale: expected a finite number, came '1'"),
        ({"mixer": ""}, "mixer: expected the name of a registered mixer, came ''"),
        ({"erase": "step"}, "base_write: expected False where erase='step'"),
        ({"n_refine": 0, "base_write": False}, "n_refine: expected at least 1 where base_write=False"),
        (
            {"anchor": "state", "source": "anchor"},
            "anchor: expected shortconv, token or none where source='anchor'",
        ),
    ],
)
def test_impossible_values_name_argument_expectation_and_value(changes, message):
    with pytest.raises(ValueError) as error:
        PrismConfig(**{"vocab_size": 8, **changes})
    assert message in str(error.value)


def test_every_choice_is_checked():
    for name in CHOICES:
        with pytest.raises(ValueError, match=f"{name}: expected one of"):
            PrismConfig(vocab_size=8, **{name: "nonsense"})


def test_presets_say_what_they_are():
    gdn, prism, paper, closed = (PrismConfig.preset(name, vocab_size=8) for name in PRESETS)
    assert gdn == PrismConfig(vocab_size=8, n_refine=0)
    assert prism == PrismConfig(vocab_size=8)
    assert (paper.base_write, paper.erase, paper.source, paper.scale) == (False, "step", "anchor", 1.0)
    assert (paper.short_conv, paper.step_gate, paper.refine_key_norm, paper.qk_norm) == (
        0,
        "raw",
        False,
        False,
    )
    assert (closed.gain, closed.refine_rank, closed.step_gate_bias) == ("sigmoid", 128, 2.0)
    with pytest.raises(
        ValueError, match="preset: expected one of gdn, prism, paper, closed_form, came 'mamba'"
    ):
        PrismConfig.preset("mamba", vocab_size=8)
    with pytest.raises(ValueError, match="vocab_size: expected an integer >= 1, came nothing"):
        PrismConfig.preset("gdn")


def test_degenerate_chain_warns():
    with pytest.warns(UserWarning, match="every later delta is 0"):
        PrismConfig(vocab_size=8, gain="one", activation="identity")
    PrismConfig(
        vocab_size=8, gain="one", activation="identity", residual="keep"
    )  # warnings are errors: none here
    PrismConfig(vocab_size=8, gain="one", activation="identity", n_refine=1)


def test_dictionary_round_trip_is_json_able_and_stable():
    for name in PRESETS:
        config = PrismConfig.preset(name, vocab_size=8, n_heads=2, n_value_heads=4, expand_v=2)
        fields = json.loads(json.dumps(config.to_dict()))
        assert PrismConfig.from_dict(fields) == config
        assert list(fields) == [field.name for field in dataclasses.fields(PrismConfig)]
    assert PrismConfig.from_dict({"vocab_size": 8}) == PrismConfig(8)
    assert PrismConfig(8, expand_v=2).to_dict() == PrismConfig(8, expand_v=2.0).to_dict()


def test_frozen_hashable_and_copied_by_pickle():
    config = PrismConfig(vocab_size=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 3
    assert hash(config) == hash(PrismConfig(vocab_size=8))
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.replace(n_refine=0).n_refine == 0
    assert config.n_refine == 2


def test_sizes():
    config = PrismConfig(8, d_model=24, n_heads=2, n_value_heads=4, expand_v=1.5)
    assert (config.key_dim, config.value_dim, config.value_heads) == (12, 18, 4)
    assert PrismConfig(8, d_model=24, head_dim=10).key_dim == 10
