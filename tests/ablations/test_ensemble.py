import dataclasses
import json
import math

import pytest
import torch

import tasks
from ablations.ensemble import Ensemble, FlatAdamW, member_hits, member_losses, row_groups
from ablations.grid import TrainSettings
from ablations.trainer import BLOCK, Trainer, learning_rates
from prism import PrismConfig, PrismModel

TASK = tasks.get("xor", length=16)
SMALL = {"vocab_size": TASK.vocab_size, "d_model": 8, "n_layers": 1}
SETTINGS = TrainSettings(
    steps=8, batch_size=4, learning_rate=2e-2, warmup_steps=2, clip=0.5, weight_decay=0.1, eval_every=4,
    val_size=8, test_size=16, dtype="float64",
)  # fmt: skip


def config(**changes):
    return PrismConfig(**{**SMALL, **changes})


def trained_alone(config, seed, settings, steps):
    """The same cell with torch's own module, optimiser and clipping."""
    model = PrismModel(config, seed=seed).double()
    exempt = [p for p in model.parameters() if getattr(p, "_no_weight_decay", False)]
    others = [p for p in model.parameters() if not getattr(p, "_no_weight_decay", False)]
    assert exempt
    assert others
    groups = [
        {"params": others, "weight_decay": settings.weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)
    block = TASK.batch(BLOCK * settings.batch_size, seed=seed, step=0)
    losses = []
    for step, rate in zip(range(steps), learning_rates(settings), strict=False):
        for group in optimiser.param_groups:
            group["lr"] = rate
        rows = slice(step * settings.batch_size, (step + 1) * settings.batch_size)
        logits = model(block.inputs[rows])
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), block.targets[rows].flatten(), ignore_index=-100
        )
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimiser.step()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_refine": 0},
        {"anchor": "token", "activation": "identity"},
        {"n_heads": 2, "n_value_heads": 4, "mlp_ratio": 0},
    ],
    ids=["prism", "gdn", "token", "grouped"],
)
def test_a_member_equals_the_cell_trained_alone(changes):
    trainer = Trainer(config(**changes), TASK, SETTINGS, seeds=[3, 0, 7])
    for _ in range(8):
        trainer.step()
    for index, seed in enumerate(trainer.seeds):
        alone, losses = trained_alone(config(**changes), seed, SETTINGS, 8)
        together = trainer.ensemble.member(index).double()
        assert trainer.loss_sum[index].item() == pytest.approx(sum(losses), rel=1e-10)
        for (name, a), b in zip(together.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_a_member_does_not_depend_on_its_company():
    settings = TrainSettings(steps=6, batch_size=4, warmup_steps=1, learning_rate=1e-2)
    alone, together = (Trainer(config(), TASK, settings, seeds) for seeds in ([5], [1, 5, 2]))
    for _ in range(6):
        alone.step()
        together.step()
    torch.testing.assert_close(together.ensemble.flat[1], alone.ensemble.flat[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together.ensemble.flat[1], together.ensemble.flat[0], atol=1e-2)


def test_logits_are_those_of_the_models():
    ensemble = Ensemble(config(), [4, 9], dtype=torch.float64)
    tokens = torch.stack([TASK.batch(3, seed=s).inputs for s in (0, 1)])
    logits = ensemble(tokens)
    for index, seed in enumerate((4, 9)):
        torch.testing.assert_close(logits[index], PrismModel(config(), seed=seed).double()(tokens[index]))
    assert ensemble.n_parameters == PrismModel(config(), seed=0).num_parameters()
    assert ensemble.scan_backend == "chunked"
    assert Ensemble(config(anchor="state"), [0]).scan_backend == "serial"
    with pytest.raises(ValueError, match="seeds: expected at least one"):
        Ensemble(config(), [])


@pytest.mark.parametrize("groups", [2, 3, 6])
def test_groups_of_rows_change_no_logit_and_no_gradient(groups):
    ensemble = Ensemble(config(short_conv=4), [4, 9], dtype=torch.float64)
    batches = [TASK.batch(6, seed=seed) for seed in (0, 1)]
    inputs, targets = (torch.stack(x) for x in zip(*batches, strict=True))
    found = []
    for count in (1, groups):
        logits = ensemble(inputs, groups=count)
        (gradient,) = torch.autograd.grad(member_losses(logits, targets).sum(), ensemble.flat)
        found.append((logits.detach(), gradient))
    assert (found[0][1].abs().amax(1) > 1e-3).all()
    for whole, cut in zip(*found, strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="groups: expected a divisor of the batch size 6, got 4"):
        ensemble(inputs, groups=4)


def test_groups_fill_a_gpu_and_are_none_elsewhere(monkeypatch):
    device = torch.device("cuda")
    gpu = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    assert row_groups(16, 32, 128, 16, torch.device("cpu")) == 1
    assert row_groups(16, 32, 128, 16, device) == 16
    assert row_groups(64, 32, 128, 16, device) == 4
    assert row_groups(2000, 32, 128, 16, device) == 1
    assert row_groups(8, 31, 128, 16, device) == 31
    assert row_groups(16, 31, 128, 16, device) == 1  # 16 at most, and 31 has no such divisor but 1
    assert row_groups(16, 32, 128, 256, device) == 4  # 1,024 tokens a group
    assert row_groups(1, 1, 8, 64, device) == 1


@pytest.mark.parametrize(("batch", "groups"), [(4, 4), (3, 1)])
def test_training_in_groups_is_the_same_training(monkeypatch, batch, groups):
    settings = dataclasses.replace(SETTINGS, batch_size=batch)
    whole, cut = (Trainer(config(), TASK, settings, seeds=[3, 0]) for _ in range(2))
    before = cut.ensemble.flat.clone()
    whole.step(), whole.step()
    asked = []

    def as_on_a_gpu(members, rows, *_):
        asked.append(rows)
        return groups

    monkeypatch.setattr("ablations.ensemble.row_groups", as_on_a_gpu)
    cut.step(), cut.step()
    assert asked == [batch, batch]
    assert not torch.allclose(cut.ensemble.flat, before, atol=1e-3)
    torch.testing.assert_close(cut.ensemble.flat, whole.ensemble.flat, rtol=1e-8, atol=1e-10)
    cut.evaluate("val", 8)
    assert asked == [batch, batch], "no gradient, no groups"


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_diverged_member_stands_still_and_the_others_never_notice(poison):
    settings = TrainSettings(
        steps=10, batch_size=4, warmup_steps=1, learning_rate=1e-2, eval_every=5, clip=1.0
    )
    clean, hurt = (Trainer(config(), TASK, settings, [0, 1, 2]) for _ in range(2))
    clean.step(), hurt.step()
    with torch.no_grad():
        hurt.ensemble.flat[1, 100] = poison
    before = hurt.ensemble.flat[1].clone()
    for _ in range(9):
        clean.step(), hurt.step()
    for index in (0, 2):
        assert torch.equal(hurt.ensemble.flat[index], clean.ensemble.flat[index])
    assert torch.equal(hurt.ensemble.flat[1].nan_to_num(7.0), before.nan_to_num(7.0))
    rows = hurt.train()
    assert [row["status"] for row in rows] == ["ok", "diverged", "ok"]
    assert rows[1]["error"] == "non-finite loss or gradient at step 1"
    assert rows[1]["steps_done"] == 1
    assert "test_accuracy" not in rows[1]
    assert math.isfinite(rows[0]["test_accuracy"])


def test_training_ends_early_when_every_member_has_diverged():
    trainer = Trainer(config(), TASK, SETTINGS, [0, 1])
    with torch.no_grad():
        trainer.ensemble.flat.fill_(math.nan)
    rows = trainer.train()
    assert trainer.steps_done == SETTINGS.eval_every
    assert [row["status"] for row in rows] == ["diverged"] * 2


def test_weight_decay_leaves_marked_parameters_alone():
    ensemble = Ensemble(config(), [0], dtype=torch.float64)
    before = {name: value.detach().clone() for name, value in ensemble.parameters().items()}
    optimiser = FlatAdamW(ensemble, [0.1], weight_decay=0.5)
    optimiser.step(torch.zeros_like(ensemble.flat), torch.zeros(1, dtype=torch.float64), torch.tensor([0]))
    marked = {
        name
        for name, p in PrismModel(config(), seed=0).named_parameters()
        if getattr(p, "_no_weight_decay", False)
    }
    assert any("A_log" in name for name in marked)
    for name, value in ensemble.parameters().items():
        torch.testing.assert_close(value.detach(), before[name] * (1.0 if name in marked else 0.95))


def test_losses_and_hits_count_scored_positions_only():
    logits = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.full((2, 3, 4), -100)
    targets[0, 0, 1], targets[0, 2, 3], targets[1, 1, 1] = 2, 0, 4
    losses = member_losses(logits, targets)
    for member in range(2):
        expected = torch.nn.functional.cross_entropy(logits[member].flatten(0, 1), targets[member].flatten())
        torch.testing.assert_close(losses[member], expected)
    logits[0, 0, 1, 2], logits[0, 2, 3, 1] = 99, 99
    hits, scored = member_hits(logits, targets)
    assert scored.tolist() == [2, 1]
    assert hits.tolist()[0] == 1


def test_a_batch_without_questions_is_no_divergence():
    losses = member_losses(torch.randn(2, 1, 3, 5), torch.tensor([[[-100] * 3], [[-100, 1, -100]]]))
    assert losses[0] == 0
    assert losses[1] > 0

    class Rare(type(TASK)):
        def batch(self, n, **which):
            batch = super().batch(n, **which)
            batch.targets[: n // 2] = -100
            return batch

    task = Rare(**TASK.params)
    rows = Trainer(config(), task, dataclasses.replace(SETTINGS, batch_size=1, clip=0.0), [0]).train()
    assert rows[0]["status"] == "ok"
    assert math.isfinite(rows[0]["curve_train_loss"][0])
    with pytest.raises(ValueError, match="val_size: expected sequences with at least one answer"):
        Trainer(config(), type("Never", (Rare,), {"batch": never})(**TASK.params), SETTINGS, [0]).train()


def never(self, n, **which):
    batch = type(TASK).batch(self, n, **which)
    batch.targets[:] = -100
    return batch


def test_schedule_warms_up_and_decays():
    settings = TrainSettings(steps=100, warmup_steps=9, learning_rate=1.0, final_fraction=0.1)
    rates = learning_rates(settings)
    assert len(rates) == 100
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert learning_rates(TrainSettings(steps=3, warmup_steps=50))[-1] == TrainSettings().learning_rate


def test_data_streams_are_the_members_own_and_training_never_sees_held_out_rows():
    trainer = Trainer(config(), TASK, TrainSettings(steps=40, batch_size=4), [0, 1])
    trainer.step()
    rows = trainer.inputs.transpose(0, 1).flatten(1, 2)
    expected = TASK.batch(BLOCK * 4, seed=1, step=0, split="train").inputs
    assert torch.equal(rows[1], expected)
    assert not torch.equal(rows[0], rows[1])
    for batch in trainer._held_out("test", 8):
        assert (TASK.split_of(batch.inputs) == 2).all()
    for _ in range(32):
        trainer.step()
    assert torch.equal(trainer.inputs[3, 0], TASK.batch(4, seed=0, step=1, start=12).inputs)


def test_every_step_reads_its_own_rows(monkeypatch):
    trainer = Trainer(config(), TASK, TrainSettings(steps=BLOCK + 2, batch_size=2), [0, 1])
    read = []
    whole = trainer._loss_and_gradient
    monkeypatch.setattr(
        trainer, "_loss_and_gradient", lambda flat, x, y: (read.append(x.clone()), whole(flat, x, y))[1]
    )
    for step in range(BLOCK + 2):
        trainer.step()
        for member, seed in enumerate(trainer.seeds):
            block, slot = divmod(step, BLOCK)
            assert torch.equal(read[-1][member], TASK.batch(2, seed=seed, step=block, start=2 * slot).inputs)


def test_scores_are_of_all_answers_alike():
    """Sequences are scored in pieces, whose answers differ in number."""
    task = tasks.get("flip_flop", length=24)
    trainer = Trainer(
        config(vocab_size=task.vocab_size), task, TrainSettings(batch_size=1, dtype="float64"), [3, 8]
    )
    scores = trainer.evaluate("test", 300)
    for member, seed in enumerate((3, 8)):
        batch = task.batch(300, seed=seed, split="test")
        assert (batch.targets[:256] != -100).double().mean() != (batch.targets[256:] != -100).double().mean()
        with torch.no_grad():
            logits = PrismModel(trainer.ensemble.config, seed=seed).double()(batch.inputs).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=-100)
        assert scores.loss[member].item() == pytest.approx(loss.item())
        scored = batch.targets.flatten() != -100
        right = (logits.argmax(-1) == batch.targets.flatten())[scored].double().mean().item()
        assert scores.accuracy[member].item() == pytest.approx(right)


def test_curves_log_means_since_the_last_entry():
    fine, coarse = (
        Trainer(config(), TASK, dataclasses.replace(SETTINGS, eval_every=every), [0, 1]).train()
        for every in (2, 8)
    )
    for a, b in zip(fine, coarse, strict=True):
        assert sum(a["curve_train_loss"]) / 4 == pytest.approx(b["curve_train_loss"][0])
        assert a["curve_train_loss"][0] != pytest.approx(b["curve_train_loss"][0], rel=1e-6)
        assert (a["val_loss"], a["val_accuracy"]) == (b["curve_val_loss"][0], b["curve_val_accuracy"][0])
        assert a["val_loss"] == a["curve_val_loss"][-1] != a["curve_val_loss"][0]


def test_a_short_training_learns():
    settings = TrainSettings(steps=150, batch_size=16, learning_rate=2e-2, warmup_steps=10, eval_every=75)
    rows = Trainer(config(short_conv=4, mlp_ratio=0, n_refine=0), TASK, settings, [0, 1]).train()
    assert max(row["test_accuracy"] for row in rows) > 0.8
    assert rows[0]["curve_step"] == [75, 150]
    assert rows[0]["curve_train_loss"][1] < rows[0]["curve_train_loss"][0]


def test_accuracy_can_be_read_by_slice():
    task = tasks.get("mqar", length=16, pairs=3, queries=2, vocab_size=24)
    settings = TrainSettings(steps=1, batch_size=2, test_size=300)
    trainer = Trainer(config(vocab_size=24), task, settings, [0, 1])
    row = trainer.train()[1]
    slices = json.loads(row["test_slices"])
    assert set(slices["pair"]) == {"0", "1", "2"}
    for found in slices.values():
        assert sum(count for _, count in found.values()) == 600
        mean = sum(accuracy * count for accuracy, count in found.values()) / 600
        assert mean == pytest.approx(row["test_accuracy"], abs=1e-5)


def test_cuda_graph_is_refused_on_a_cpu():
    with pytest.raises(ValueError, match="cuda_graph: expected False on device cpu"):
        Trainer(config(), TASK, SETTINGS, [0], cuda_graph=True)
    trainer = Trainer(config(), TASK, TrainSettings(steps=1, batch_size=2), [0])
    trainer.step()
    with pytest.raises(ValueError, match="at most 1 steps"):
        trainer.step()


def test_the_compiled_step_is_the_step():
    settings = TrainSettings(steps=3, batch_size=2, warmup_steps=1, learning_rate=1e-2)
    eager, compiled = (
        Trainer(config(mlp_ratio=0), TASK, settings, [0, 1], compile=wanted) for wanted in (False, True)
    )
    compiled._compile_backend = "eager"  # the traced graph is what is tested, not inductor
    for _ in range(3):
        eager.step()
        compiled.step()
    assert compiled._compiled is not None
    torch.testing.assert_close(compiled.ensemble.flat, eager.ensemble.flat)


gpu = pytest.mark.gpu
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@gpu
@cuda
@pytest.mark.parametrize("changes", [{}, {"n_refine": 0}], ids=["prism", "gdn"])
def test_captured_step_equals_eager_steps_on_the_cpu(changes):
    settings = TrainSettings(steps=40, batch_size=8, learning_rate=5e-3, warmup_steps=5, eval_every=20)
    seeds = [0, 1, 2]
    on_cpu = Trainer(config(**changes), TASK, settings, seeds).train()
    captured = Trainer(config(**changes), TASK, settings, seeds, device="cuda")
    rows = captured.train()
    assert captured._graph is not None
    assert {row["scan_backend"] for row in rows} == {"triton"}
    for a, b in zip(rows, on_cpu, strict=True):
        assert a["curve_train_loss"] == pytest.approx(b["curve_train_loss"], rel=2e-3)


@gpu
@cuda
def test_captured_step_equals_the_eager_step_on_the_same_device():
    settings = TrainSettings(steps=36, batch_size=8, learning_rate=5e-3, warmup_steps=5, eval_every=20)
    captured, eager = (
        Trainer(config(), TASK, settings, [0, 1], device="cuda", cuda_graph=wanted)
        for wanted in (True, False)
    )
    for _ in range(36):  # across a block of batches, so that replay sees new contents
        captured.step()
        eager.step()
    torch.testing.assert_close(captured.ensemble.flat, eager.ensemble.flat, rtol=1e-4, atol=1e-5)
    assert captured.index.item() == 36


@gpu
@cuda
def test_learning_curves_on_the_kernel_equal_those_of_chunked():
    settings = TrainSettings(steps=60, batch_size=8, learning_rate=5e-3, warmup_steps=5, eval_every=20)
    kernel, chunked = (
        Trainer(config(scan_backend=backend), TASK, settings, [0, 1], device="cuda").train()
        for backend in ("triton", "chunked")
    )
    for a, b in zip(kernel, chunked, strict=True):
        assert a["curve_train_loss"] == pytest.approx(b["curve_train_loss"], rel=5e-3)


@gpu
@cuda
def test_a_diverged_member_under_a_graph():
    settings = TrainSettings(steps=10, batch_size=4, warmup_steps=1, eval_every=5)
    trainer = Trainer(config(), TASK, settings, [0, 1], device="cuda")
    trainer.step()
    with torch.no_grad():
        trainer.ensemble.flat[1, 100] = math.nan
    assert [row["status"] for row in trainer.train()] == ["ok", "diverged"]
