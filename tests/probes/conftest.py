"""Small float64 models, and the recurrence written out token by token on dense matrices."""

import pytest
import torch

from prism import PrismConfig, PrismModel

ARMS = {
    "gdn": {"preset": "gdn"},
    "prism": {"preset": "prism"},
    "grouped": {
        "preset": "prism",
        "n_heads": 2,
        "n_value_heads": 4,
        "head_dim": 4,
        "expand_v": 1.5,
        "n_refine": 3,
    },
    "paper": {"preset": "paper"},
    "closed form": {"preset": "closed_form", "refine_rank": 4},
    "no erase": {"preset": "prism", "erase": "none"},
    "negative eigenvalues": {"preset": "prism", "erase": "two_sigmoid", "n_refine": 4},
    "no base write": {"preset": "prism", "base_write": False},
    "state anchor": {"preset": "prism", "anchor": "state"},
    "shared key": {"preset": "prism", "refine_keys": "shared", "n_refine": 3},
    "base key": {"preset": "prism", "refine_keys": "base", "n_refine": 3},
}
REFINED = [name for name in ARMS if name != "gdn"]


def make(arm="prism", seed=0, dtype=torch.float64, **changes):
    options = {"vocab_size": 12, "d_model": 8, "n_layers": 2, "n_heads": 1} | ARMS[arm] | changes
    return PrismModel(PrismConfig.preset(options.pop("preset"), **options), seed=seed, dtype=dtype)


def tokens(B=3, T=13, seed=0, vocabulary=12):
    return torch.randint(vocabulary, (B, T), generator=torch.Generator().manual_seed(seed))


class Dense:
    """S_t, Sbar_t, A_t, B_t of one layer as matrices [B, T, HV, V, K] (on paper's side: value by key), by a
    loop.
    """

    def __init__(self, model, inputs, layer):
        _, cache = model.run_with_cache(inputs, names=[f"blocks.{layer}.mixer.*"])
        self.cache = {name.rsplit(".", 1)[1]: tensor for name, tensor in cache.items()}
        f = cache.factors(layer)
        B, T, HV, V = f.v.shape
        self.k = f.k.repeat_interleave(HV // f.k.shape[2], 2)
        K = self.k.shape[-1]
        self.v, self.beta, self.alpha = f.v, f.beta, f.log_decay.exp()
        self.write_k = f.write_k if f.write_k is not None else f.v.new_zeros(B, T, HV, 0, K)
        self.write_v = f.write_v if f.write_v is not None else f.v.new_zeros(B, T, HV, 0, V)
        eye = torch.eye(K, dtype=f.v.dtype)
        outer = torch.einsum("bthi,bthj->bthij", self.k, self.k)
        self.A = self.alpha[..., None, None] * (eye - self.beta[..., None, None] * outer)
        self.B = torch.einsum("bth,bthv,bthk->bthvk", self.beta, self.v, self.k)
        self.B = self.B + torch.einsum("bthlv,bthlk->bthvk", self.write_v, self.write_k)
        state = f.v.new_zeros(B, HV, V, K)
        before, after = [], []
        for t in range(T):
            before.append(state)
            state = state @ self.A[:, t] + self.B[:, t]
            after.append(state)
        self.before, self.S = torch.stack(before, 1), torch.stack(after, 1)
        self.update = self.S - self.alpha[..., None, None] * self.before


@pytest.fixture
def helpers():
    class Helpers:
        pass

    found = Helpers()
    found.make, found.tokens, found.Dense, found.ARMS, found.REFINED = make, tokens, Dense, ARMS, REFINED
    return found


def pytest_generate_tests(metafunc):
    for fixture, values in (("arm", list(ARMS)), ("refined_arm", REFINED)):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, values)
