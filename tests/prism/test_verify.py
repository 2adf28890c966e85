"""`verify` passes on every backend here, and fails, by name and amount, when something is wrong."""

import math

import pytest
import torch

import prism.verify as verify
from prism._oracles import gated_delta_loop, longer_loop, random_factors


@pytest.fixture(scope="module")
def rows():
    return verify.run("cpu")


def test_everything_that_can_run_passes(rows):
    failed = [row for row in rows if row.status == "failed"]
    assert not failed
    for backend in ("recurrent", "chunked"):
        passed = {row.identity for row in rows if row.backend == backend and row.status == "passed"}
        assert passed >= set(verify.IDENTITIES)
        errors = [row.error for row in rows if row.backend == backend and row.identity in verify.IDENTITIES]
        assert max(errors) < 1e-10
    of_the_layer = [
        r for r in rows if r.identity == "L = 0 layer is Gated DeltaNet" and r.backend == "chunked"
    ]
    gradients = {row.tensor for row in of_the_layer if row.tensor.startswith("gradient")}
    assert len(gradients) == 14  # x and fla's 13 tensors
    assert {"output", "state"} <= {row.tensor for row in of_the_layer}


def test_what_cannot_run_is_skipped_and_says_why(rows):
    skipped = [row for row in rows if row.status == "skipped"]
    for row in skipped:
        assert row.ok
        assert "cannot run here" in row.note or "not installed" in row.note
    if not torch.cuda.is_available():
        assert any(row.backend == "triton" and "CUDA" in row.note for row in skipped)


@pytest.mark.parametrize("identity", verify.IDENTITIES)
def test_a_wrong_scan_fails_every_identity(identity, monkeypatch):
    """A scan whose outputs are off by 1e-6 from the second token on is caught, with the tensor and by how
    much.
    """
    right = verify.prism_scan

    def wrong(q, k, v, log_decay, beta, write_k=None, write_v=None, **options):
        o, state = right(q, k, v, log_decay, beta, write_k, write_v, **options)
        bump = torch.zeros_like(o)
        bump[:, 1:] = 1e-6 if write_k is None else 2e-6
        return o + bump * (1 + o.detach()), state

    monkeypatch.setattr(verify, "prism_scan", wrong)
    monkeypatch.setattr("prism.mixer.prism_scan", wrong)
    rows = verify._rows(identity, verify.IDENTITIES[identity], "cpu", torch.float64, "recurrent", 1e-10)
    failed = [row for row in rows if row.status == "failed"]
    assert failed
    output = [row for row in failed if row.tensor.startswith(("output", "logits", "layer output"))]
    assert output
    assert all(1e-9 < row.error < 1e-3 for row in output)


def test_a_wrong_gradient_fails(monkeypatch):
    right = verify.prism_scan

    class Twist(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * (1 + 1e-7)

    def wrong(q, k, v, log_decay, beta, *rest, **options):
        return right(q, k, v, log_decay, Twist.apply(beta), *rest, **options)

    monkeypatch.setattr(verify, "prism_scan", wrong)
    rows = verify._rows("x", verify.level_zero, "cpu", torch.float64, "chunked", 1e-10)
    assert [row.tensor for row in rows if row.status == "failed"] == ["gradient of beta"]


def test_comparisons_that_cannot_pass():
    one = torch.ones(3)
    nan = torch.tensor([1.0, math.nan, 1.0])
    assert verify.compare("i", "t", nan, one, 1.0, "b").error == math.inf
    assert verify.compare("i", "t", one, nan, 1.0, "b").status == "failed"
    assert verify.compare("i", "t", one[:2], one, 1.0, "b").tensor == "t (shape)"
    row = verify.compare("i", "t", one + 0.5, one, 0.1, "b")
    assert (row.status, row.tensor, round(row.error, 6)) == ("failed", "t", 0.5)
    assert verify.compare("i", "t", 100 * one + 0.5, 100 * one, 0.1, "b").status == "passed"


def test_a_crash_is_a_failed_row():
    def broken(device, dtype, backend):
        yield "first", torch.ones(1), torch.ones(1)
        raise IndexError("out of reach")

    first, crash = verify._rows("i", broken, "cpu", torch.float64, "b", 1.0)
    assert first.status == "passed"
    assert (crash.status, crash.tensor, crash.ok) == ("failed", "IndexError: out of reach", False)


def test_a_missing_peer_is_skipped_never_passed(monkeypatch):
    monkeypatch.setattr(verify, "PEERS", {"a peer": ("a_package_that_nobody_has", None)})
    monkeypatch.setattr(verify, "IDENTITIES", {})
    rows = verify.run("cpu", backends=("chunked",))
    assert [(r.identity, r.status) for r in rows] == [("a peer", "skipped")]
    assert "not installed: No module named 'a_package_that_nobody_has'" in rows[0].note


def test_the_two_loops_agree():
    factors = random_factors(3, 0, "cpu")
    base = {n: t for n, t in factors.items() if not n.startswith("write_")}
    for a, b in zip(gated_delta_loop(**base), longer_loop(**factors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
