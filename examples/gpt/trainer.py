"""The training loop: steps, evaluations, checkpoints and a record of the run."""

from __future__ import annotations

import signal
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.gpt.checkpoint import load_checkpoint, rng_state, save_checkpoint, set_rng_state
from examples.gpt.config import TrainConfig, lr_factor
from examples.gpt.data import Batch, Corpus, batch_offsets, validation_offsets, windows_at
from examples.gpt.errors import ExampleError
from examples.gpt.metrics import peak_rss_bytes, summarize, versions
from examples.gpt.model import GPT
from examples.gpt.probe import CommunicationProbe
from examples.gpt.progress import Reporter
from examples.gpt.ranks import Ranks, ddp_class, transport_of
from torchddp import StopTogether

MAX_GRADIENT_NORM = 1.0


class Trainer:
    """One rank's part of a run. Every public method is collective: all ranks call it together."""

    stop_signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, config: TrainConfig, ranks: Ranks, corpus: Corpus) -> None:
        self.config = config
        self.ranks = ranks
        self.corpus = corpus
        torch.manual_seed(config.seed)
        shape = {name: getattr(config, name) for name in ("block_size", "layers", "width", "heads", "dropout")}
        self.gpt = GPT(**shape).to(ranks.device)
        self.optimizers = self._optimizers(self.gpt)
        self.hook = self._comm_hook()
        self.model = self._wrap(self.gpt)
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, config))
            for optimizer in self.optimizers
        ]
        torch.manual_seed(config.seed * 1_000_003 + ranks.rank + 1)  # dropout differs between ranks
        self.first_step = 0
        self.steps: list[dict[str, Any]] = []
        self.validation: list[dict[str, Any]] = []
        self._averaged_steps = 0

    def _optimizers(self, gpt: GPT) -> list[Any]:
        """AdamW first; Muon, if chosen, has the matrices in the blocks. A single OSS if they are sharded."""
        adamw: dict[str, Any] = {"lr": self.config.lr, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
        muon: dict[str, Any] = {"lr": self.config.muon_lr, "weight_decay": 0.1}
        matrices = [p for p in gpt.blocks.parameters() if p.ndim == 2] if self.config.optimizer == "muon" else []
        rest = [p for p in gpt.parameters() if all(p is not matrix for matrix in matrices)]
        if self._is_sharded:
            from torchddp.optim import OSS

            own = [{"params": matrices, "optim": torch.optim.Muon, **muon}] if matrices else []
            return [OSS([{"params": rest}, *own], optim=torch.optim.AdamW, **adamw)]
        return [torch.optim.AdamW(rest, **adamw), *([torch.optim.Muon(matrices, **muon)] if matrices else [])]

    @property
    def _is_sharded(self) -> bool:
        return self.config.ddp == "sharded"

    def _comm_hook(self) -> Any:
        if self.config.comm_hook is None:
            return None
        from torchddp import comm_hooks

        return comm_hooks.resolve(self.config.comm_hook)[1]

    def _wrap(self, gpt: GPT) -> nn.Module:
        if self.config.ddp == "none":
            return gpt
        wrapper: Any = ddp_class(self.config.ddp)
        options = self._wrapper_options()
        return wrapper(gpt, self.optimizers, **options) if self._is_sharded else wrapper(gpt, **options)

    def _wrapper_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.ranks.device.type == "cuda":
            options["device_ids"] = [self.ranks.device.index]
        if self.hook is not None:
            options["comm_hook"] = self.hook
        return options

    def resume(self) -> None:
        """Continue where the checkpoint left off."""
        assert self.config.checkpoint is not None
        with self.ranks.together():
            content = load_checkpoint(self.config.checkpoint, self._identity())
            if content["step"] >= self.config.last_step:
                raise ExampleError(
                    f"checkpoint {self.config.checkpoint} is already at step {content['step']}, "
                    f"but this run ends with step {self.config.last_step}"
                )
        self.gpt.load_state_dict(content["model"])
        if len(content["optimizers"]) != len(self.optimizers):
            raise ExampleError(f"checkpoint {self.config.checkpoint}: with Muon, --ddp sharded reads only its own")
        for part, states in ((self.optimizers, "optimizers"), (self.schedulers, "schedulers")):
            for one, state in zip(part, content[states], strict=True):
                one.load_state_dict(state)
        if self.ranks.rank < len(content["rng"]):  # otherwise more ranks than before
            if self.hook is not None:
                self.hook.load_state_dict(content["hooks"][self.ranks.rank])
            set_rng_state(content["rng"][self.ranks.rank], self.ranks.device)
        self.first_step = content["step"]

    def run(self) -> dict[str, Any]:
        """Train to the last step and return the record of the run, which is equal on all ranks except for timings.

        SIGTERM or SIGUSR1 on any rank ends it earlier, on all ranks after the same step, and with a checkpoint.
        """
        config = self.config
        probe = CommunicationProbe(self.model, self.ranks, config.measure_comm, self.first_step)
        reporter = Reporter(
            name=config.ddp,
            first_step=self.first_step,
            last_step=config.last_step,
            total_steps=config.steps,
            shown=self.ranks.rank == 0,
        )
        with reporter, StopTogether(signals=self.stop_signals) as stop:
            for step in range(self.first_step, config.last_step):
                self._train_step(step, probe)
                done, ended = step + 1, bool(stop) or step + 1 == config.last_step
                reporter.step(done, self.steps[-1]["loss"], self.steps[-1]["step_ms"])
                if ended or done % config.eval_interval == 0:
                    self._average_losses()
                    self.validation.append({"step": done, "loss": self.validation_loss()})
                    reporter.evaluation(done, self.steps[-1]["loss"], self.validation[-1]["loss"])
                if config.checkpoint and (ended or (config.save_every and done % config.save_every == 0)):
                    self.save(done)
                if ended:
                    break
        if stop and self.ranks.rank == 0:
            print(f"stopped after step {self.first_step + len(self.steps)}: {stop.reason}", flush=True)
        return self._record(probe)

    def _train_step(self, step: int, probe: CommunicationProbe) -> None:
        start = time.perf_counter()
        batches = self._batches(step)

        def forward_backward(exchange: bool) -> float:
            return self._forward_backward(batches, exchange)

        learning_rate = self.schedulers[0].get_last_lr()[0]
        if probe.wants(step):
            loss = probe.around(step, forward_backward, self._update)
        else:
            loss = forward_backward(True)
            self._update()
        step_ms = (time.perf_counter() - start) * 1e3
        self.steps.append(
            {"step": step + 1, "loss": loss, "lr": learning_rate, "step_ms": step_ms, "probed": probe.wants(step)}
        )

    def _batches(self, step: int) -> list[Batch]:
        config, text = self.config, self.corpus.train
        drawn = [
            batch_offsets(
                seed=config.seed,
                index=step * config.grad_accum + micro,
                rank=self.ranks.rank,
                world_size=self.ranks.world_size,
                batch_size=config.batch_size,
                choices=text.numel() - config.block_size,
            )
            for micro in range(config.grad_accum)
        ]
        return [windows_at(text, offsets, config.block_size, self.ranks.device) for offsets in drawn]

    def _forward_backward(self, batches: list[Batch], exchange: bool) -> float:
        """Accumulate the gradients of all micro-batches, reduce them in the last one, and return the mean loss."""
        total = 0.0
        for number, (tokens, targets) in enumerate(batches, start=1):
            with nullcontext() if exchange and number == len(batches) else self._no_sync():
                loss = self.model(tokens, targets) / len(batches)
                loss.backward()
            total += loss.item()
        return total

    def _no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync() if isinstance(self.model, nn.parallel.DistributedDataParallel) else nullcontext()

    def _update(self) -> None:
        if self._is_sharded:
            self.optimizers[0].clip_grad_norm(MAX_GRADIENT_NORM)  # no rank has all gradients
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)

    def validation_loss(self) -> float:
        """Mean loss over fixed windows of the validation text, divided among the ranks."""
        config, text = self.config, self.corpus.validation
        windows = config.eval_batches * config.batch_size * self.ranks.world_size
        offsets = validation_offsets(size_bytes=text.numel(), block_size=config.block_size, windows=windows)
        mine = offsets[self.ranks.rank :: self.ranks.world_size]
        self.gpt.eval()
        with torch.no_grad():
            batches = (
                windows_at(text, part, config.block_size, self.ranks.device) for part in mine.split(config.batch_size)
            )
            total = sum(self.gpt(tokens, targets).item() for tokens, targets in batches)
        self.gpt.train()
        return self.ranks.sums([total / config.eval_batches])[0] / self.ranks.world_size

    def _average_losses(self) -> None:
        """Replace this rank's losses by the means over the ranks. Called every few steps, not in every step."""
        fresh = self.steps[self._averaged_steps :]
        for entry, total in zip(fresh, self.ranks.sums([entry["loss"] for entry in fresh]), strict=True):
            entry["loss"] = total / self.ranks.world_size
        self._averaged_steps = len(self.steps)

    def save(self, step: int) -> None:
        """Write the checkpoint on rank 0, with every rank's random state."""
        assert self.config.checkpoint is not None
        states = self.ranks.gather(rng_state(self.ranks.device))
        # Each rank's hook has its own residuals.
        hooks = [] if self.hook is None else self.ranks.gather(self.hook.state_dict())
        if self._is_sharded:
            self.optimizers[0].consolidate_state_dict(recipient_rank=0)
        with self.ranks.together():
            if self.ranks.rank == 0:
                content = {
                    "identity": self._identity(),
                    "step": step,
                    "model": self.gpt.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                    "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
                    "rng": states,
                    "hooks": hooks,
                }
                save_checkpoint(self.config.checkpoint, content)

    def _identity(self) -> dict[str, Any]:
        return {
            "model": self.config.model_identity(),
            "training": self.config.training_identity(),
            "data": self.corpus.sha256,
        }

    def _record(self, probe: CommunicationProbe) -> dict[str, Any]:
        peaks = self.ranks.gather((probe.training_peak_rss_bytes or peak_rss_bytes(), peak_rss_bytes()))
        options = asdict(self.config)
        run = {
            "config": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
            "world_size": self.ranks.world_size,
            "device": str(self.ranks.device),
            "transport": transport_of(self.model),
            "parameters": sum(parameter.numel() for parameter in self.gpt.parameters()),
            "data": {
                "source": self.corpus.source,
                "size_bytes": self.corpus.size_bytes,
                "sha256": self.corpus.sha256,
            },
            "first_step": self.first_step + 1,
            "steps": self.steps,
            "validation": self.validation,
            "communication": probe.averaged(),
            "memory": {
                "training_peak_rss_bytes": max(peak for peak, _ in peaks),
                "peak_rss_bytes": max(peak for _, peak in peaks),
            },
            "versions": versions(),
        }
        return {"summary": summarize([run]), **run}
