"""Train the seeds of one arm on one task as one batched model, and score each of them.

A step is tensor operations on static buffers only: the schedule is a table read at the step's index and
batches are read from a block generated ahead. On CUDA the whole step is therefore captured in one graph and
replayed, and the host has nothing to do but generate a block of batches every BLOCK steps.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import tasks
from ablations.ensemble import IGNORED, Ensemble, FlatAdamW, member_hits, member_losses
from ablations.grid import TrainSettings, state_size
from prism import PrismConfig, PrismModel

BLOCK = 32
"""Steps whose batches come from one call; it defines the data streams, so it moves with RESULTS_VERSION."""

_EVAL_ROWS = 256
_WARM_UP_CALLS = 3


def learning_rates(settings: TrainSettings) -> list[float]:
    """Learning rate of every step: linear warm-up, then a half cosine to `final_fraction` of the peak."""
    warm, last = min(settings.warmup_steps, settings.steps - 1), settings.final_fraction
    rates = []
    for step in range(settings.steps):
        if step < warm:
            share = (step + 1) / (warm + 1)
        else:
            share = last + (1 - last) * 0.5 * (
                1 + math.cos(math.pi * (step - warm) / max(1, settings.steps - warm))
            )
        rates.append(share * settings.learning_rate)
    return rates


class Scores(NamedTuple):
    """Of each member: accuracy, loss, and its answer at every position."""

    accuracy: Float[Tensor, " M"]
    loss: Float[Tensor, " M"]
    predictions: Int[Tensor, "M rows T"]


class Trainer:
    """Members of one configuration, one per seed, on their own data streams.

    Member m at step t reads rows (t mod BLOCK) * B .. of `task.batch(..., seed=seeds[m], step=t // BLOCK)`.

    cuda_graph: capture the step (default on CUDA). compile: pass losses and gradient through torch.compile.
    """

    def __init__(
        self,
        config: PrismConfig,
        task: tasks.Task,
        settings: TrainSettings,
        seeds: Sequence[int],
        device: torch.device | str = "cpu",
        compile: bool = False,
        cuda_graph: bool | None = None,
    ) -> None:
        self.task, self.settings, self.seeds, self.device = task, settings, tuple(seeds), torch.device(device)
        self.ensemble = Ensemble(config, seeds, device, getattr(torch, settings.dtype))
        self.optimiser = FlatAdamW(
            self.ensemble,
            learning_rates(settings),
            settings.betas,
            settings.eps,
            settings.weight_decay,
            settings.clip,
        )
        shape = (BLOCK, len(self.seeds), settings.batch_size, task.width("train"))
        self.inputs = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.targets = torch.zeros_like(self.inputs)
        self.index = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.loss_sum = torch.zeros(len(self.seeds), dtype=torch.float64, device=self.device)
        self.steps_done = 0
        self._wants_compile, self._compile_backend = compile, "inductor"
        self._compiled: Callable[..., tuple[Tensor, Tensor]] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._wants_graph = self.device.type == "cuda" if cuda_graph is None else cuda_graph
        if self._wants_graph and self.device.type != "cuda":
            raise ValueError(f"cuda_graph: expected False on device {self.device}, got True")
        self._kept: dict[tuple[str, int], list[tasks.Batch]] = {}

    def step(self) -> None:
        """One optimiser step of every member."""
        if self.steps_done >= self.settings.steps:
            raise ValueError(f"step: expected at most {self.settings.steps} steps, all are done")
        if self.steps_done % BLOCK == 0:
            self._fill(self.steps_done // BLOCK)
        if self._wants_graph:
            if self._graph is None:
                self._capture()
            assert self._graph is not None
            self._graph.replay()
        else:
            self._step()
        self.steps_done += 1

    def evaluate(self, split: str, rows: int) -> Scores:
        """Score each member on `rows` sequences of its own of a split; everything comes back on the CPU."""
        batches = self._held_out(split, rows)
        inputs = torch.stack([batch.inputs for batch in batches])
        targets = torch.stack([batch.targets for batch in batches])
        hits = torch.zeros(len(self.seeds), dtype=torch.int64, device=self.device)
        scored, losses = hits.clone(), hits.double()
        predictions = []
        with torch.no_grad():
            for x, y in zip(inputs.split(_EVAL_ROWS, dim=1), targets.split(_EVAL_ROWS, dim=1), strict=True):
                logits = self.ensemble(x)
                right, of = member_hits(logits, y)
                losses += member_losses(logits, y).double() * of
                hits += right
                scored += of
                predictions.append(logits.argmax(-1).cpu())
        return Scores((hits.double() / scored).cpu(), (losses / scored).cpu(), torch.cat(predictions, 1))

    def train(self, on_step: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
        """Train to the end; returns a row per member (columns of `store.SCHEMA`) in the order of seeds."""
        started = time.perf_counter()
        settings, curves, logged = self.settings, _Curves(), self.steps_done

        def log() -> None:
            nonlocal logged
            train_loss = (self.loss_sum / max(1, self.steps_done - logged)).cpu()
            curves.add(self.steps_done, train_loss, self.evaluate("val", settings.val_size))
            self.loss_sum.zero_()
            logged = self.steps_done

        # Once every member has diverged nothing is left that could learn.
        while self.steps_done < settings.steps and bool(self.optimiser.alive.any()):
            for _ in range(min(settings.eval_every, settings.steps - self.steps_done)):
                self.step()
                if on_step is not None:
                    on_step(self.steps_done)
            log()
        if not curves.steps:
            log()
        test = self.evaluate("test", settings.test_size)
        return self._result(curves, test, time.perf_counter() - started)

    def models(self) -> list[PrismModel]:
        """The members as PrismModels on the CPU, in the order of the seeds."""
        return [self.ensemble.member(index) for index in range(len(self.seeds))]

    def _loss_and_gradient(self, flat: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Losses [M] and their gradient [M, P] by the parameters `flat`."""
        flat = flat.detach().requires_grad_()
        losses = member_losses(self.ensemble(inputs, flat), targets)
        # Members share nothing, so the gradient of the sum is each member's own gradient.
        (gradient,) = torch.autograd.grad(losses.sum(), flat)
        return losses.detach(), gradient

    def _step(self) -> None:
        slot = self.index % BLOCK
        inputs, targets = (x.index_select(0, slot)[0] for x in (self.inputs, self.targets))
        flat = self.ensemble.flat.detach()
        if self._wants_compile and self._compiled is None:
            self._compiled = self._compile(flat, inputs, targets)
        losses, gradient = (self._compiled or self._loss_and_gradient)(flat, inputs, targets)
        self.optimiser.step(gradient, losses, self.index)
        self.loss_sum += losses
        self.index += 1

    def _compile(self, *inputs: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
        """Losses and gradient as one graph, compiled.

        Traced with vmap and autograd resolved: Dynamo on its own loses the scan's backward under vmap.
        """
        traced = make_fx(lambda flat, x, y: self._loss_and_gradient(flat, x, y))(*inputs)
        compiled = torch.compile(traced, dynamic=False, backend=self._compile_backend)

        def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                losses, gradient = compiled(*inputs)
            return losses, gradient

        return run

    def _fill(self, block: int) -> None:
        rows = BLOCK * self.settings.batch_size
        batch = self.task.batch(rows, seed=self.seeds, step=block, split="train", device=self.device)
        shape = (len(self.seeds), BLOCK, self.settings.batch_size, -1)
        self.inputs.copy_(batch.inputs.view(shape).transpose(0, 1))
        self.targets.copy_(batch.targets.view(shape).transpose(0, 1))

    def _held_out(self, split: str, rows: int) -> list[tasks.Batch]:
        if (split, rows) not in self._kept:
            batches = [
                self.task.batch(rows, seed=seed, step=0, split=split, device=self.device)
                for seed in self.seeds
            ]
            if not all((batch.targets != IGNORED).any() for batch in batches):
                raise ValueError(
                    f"{split}_size: expected sequences with at least one answer per seed, got none in {rows}"
                )
            self._kept[split, rows] = batches
        return self._kept[split, rows]

    def _slices(self, member: int, predictions: Int[Tensor, "rows T"]) -> str:
        """Test accuracy by position, length ..., as JSON: slice -> value -> [accuracy, positions]."""
        batch = self._held_out("test", self.settings.test_size)[member].to("cpu")
        return json.dumps(
            {
                name: {str(value): [round(accuracy, 6), count] for value, (accuracy, count) in found.items()}
                for name, found in tasks.by_slice(predictions, batch).items()
            }
        )

    def _capture(self) -> None:
        """Capture a step. Kernels compile in the calls before; what they changed is put back."""
        changed = [*self.optimiser.state(), self.index, self.loss_sum]
        kept = [tensor.clone() for tensor in changed]
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_CALLS):
                self._step()
                self._restore(changed, kept)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):  # the default one may be another device's
            self._step()
        self._restore(changed, kept)
        self._graph = graph

    @staticmethod
    def _restore(changed: list[Tensor], kept: list[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(changed, kept, strict=True):
                tensor.copy_(value)

    def _result(self, curves: _Curves, test: Scores, seconds: float) -> list[dict[str, Any]]:
        task, config = self.task, self.ensemble.config
        rows = []
        for member, died in enumerate(self.optimiser.diverged_at.tolist()):
            row: dict[str, Any] = {
                "status": "ok" if died < 0 else "diverged",
                "error": None if died < 0 else f"non-finite loss or gradient at step {died}",
                "chance": task.chance,
                "majority": task.majority,
                "ceiling": task.ceiling,
                "parameters": self.ensemble.n_parameters,
                "state_size": state_size(config),
                "steps_done": self.steps_done if died < 0 else died,
                "seconds": seconds,
                "members": len(self.seeds),
                "scan_backend": self.ensemble.scan_backend,
                **curves.of(member),
            }
            if died < 0:
                row |= {"test_accuracy": test.accuracy[member].item(), "test_loss": test.loss[member].item()}
                row["test_slices"] = self._slices(member, test.predictions[member])
                row |= {"val_accuracy": curves.accuracy[-1][member], "val_loss": curves.val_loss[-1][member]}
            rows.append(row)
        return rows


class _Curves:
    """What is logged along the way, per member."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.train_loss: list[list[float]] = []
        self.val_loss: list[list[float]] = []
        self.accuracy: list[list[float]] = []

    def add(self, step: int, train_loss: Tensor, val: Scores) -> None:
        self.steps.append(step)
        self.train_loss.append(train_loss.tolist())
        self.accuracy.append(val.accuracy.tolist())
        self.val_loss.append(val.loss.tolist())

    def of(self, member: int) -> dict[str, list[Any]]:
        return {
            "curve_step": list(self.steps),
            "curve_train_loss": [losses[member] for losses in self.train_loss],
            "curve_val_loss": [losses[member] for losses in self.val_loss],
            "curve_val_accuracy": [accuracies[member] for accuracies in self.accuracy],
        }
