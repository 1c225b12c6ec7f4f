"""What every trainer is made of: scoring, the update, sending and state, over any sharded model.

`GrpoTrainer` is one rank of a trainer; made by `engines.host.Host` in a process of its own. Every
public method but `scores` is a collective: all ranks call it with the same arguments, in the same
order, and `engines.train.group.TrainerGroup` sees to that. Invariants: no result depends on the
number of ranks (under the tree reduction) nor on which trainer it is; what is digested is the live
value that is then used; the trainer is never shown the rollout's log-probs.

A trainer for another library subclasses it and says how its model is built, how one slot's
gradients are taken and summed, and what it sends:

    trainer = Fsdp2Trainer(spec_json, dcp_dir=folder, rank=0, world_size=1, rendezvous="file://...")
    root = trainer.score(samples)
    record = trainer.update(samples, step=1, update=0)
    references, sent = trainer.send(version=1)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from engines import numerics
from engines.checkpoint.dcp import DcpStorage, Storage
from engines.contracts import Flip, TrainSample, UpdateRecord
from engines.environment import apply_torch_determinism, read_back, refuse_flash_attention_3
from engines.faults import choose_name, flip_bit, flip_float32
from engines.gates.audit import OpsOutside, require_exact
from engines.provenance.digest import digest_array, digest_floats, digest_json
from engines.train.advantages import round_to_float32
from engines.train.evidence import flip_shard, keep_shards, keep_tensors
from engines.train.generators import untouched_generators
from engines.train.grpo import (
    SampleFigures,
    UpdateTotals,
    sample_figures,
    slot_loss,
    token_terms,
    update_metrics,
)
from engines.train.lr_schedule import learning_rate, weight_decay
from engines.train.optimizer import ShardedAdamW
from engines.train.reduction import clip_coefficient, total_norm
from engines.train.reference import Reference
from engines.train.scored import behaviour_logprobs, require_no_gradient, scored_rows
from engines.train.scoring import Scores
from engines.train.sending import SendsWeights
from engines.train.shards import Shard, all_objects, gathered, join, merged_digests
from engines.train.sleep import Resident, Sleeps
from engines.train.slots import (
    num_rows,
    pack_slot,
    plan_slot_parts,
    plan_slots,
)
from engines.train.state import TrainingState
from model_specs.errors import EngineError, SpecError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.run_spec import RunSpec, StockReduction, TreeReduction


class GrpoTrainer(Scores, SendsWeights, Sleeps, ABC):
    """This rank's share of `engines.contracts.Trainer`; see the methods there."""

    def __init__(
        self,
        spec_json: str,
        *,
        dcp_dir: str,
        rank: int,
        world_size: int,
        rendezvous: str,
        threads: int | None = None,
    ) -> None:
        """Join the other ranks, build the model, load its weights and audit its ops.

        Args:
            spec_json: A `RunSpec` as JSON.
            dcp_dir: The run's converted initial weights; also the reference of a resumed run.
            rank: Of [0, world_size).
            world_size: Number of ranks; must divide the number of slots.
            rendezvous: `file://` and the path of a file that does not exist yet.
            threads: Of this process; None takes `execution.threads`.
        """
        self.spec = RunSpec.model_validate_json(spec_json)
        self._rank, self._world_size = rank, world_size
        if self.spec.reduction.slots % world_size:
            raise EngineError(
                f"{world_size} trainer ranks do not divide reduction.slots="
                f"{self.spec.reduction.slots}; every rank must be dealt the same number of slots"
            )
        refuse_flash_attention_3()
        apply_torch_determinism(threads or self.spec.execution.threads)
        self._compute_dtype: torch.dtype = getattr(torch, self.spec.numerics.compute_dtype)
        join(rendezvous, rank=rank, world_size=world_size)
        self._check_stock_reduction()
        self._shards = self._build()
        self._optimizer = ShardedAdamW(self._shards, self.spec.optimizer)
        self._state = TrainingState(
            self._shards,
            self._optimizer,
            initial_dir=dcp_dir,
            trajectory=trajectory_fingerprint(self.spec),
            storage=self._storage(),
        )
        self._state.load_initial()
        self._publish()
        self._last_weights = self.weight_digests()
        self._reference = (
            Reference(self._shards, compute_dtype=self._compute_dtype, publish=self._publish)
            if self.spec.loss.reference
            else None
        )
        self._forget_scores()
        self._resident = Resident(self._resident_tensors)
        self._ops_outside = self.audit()

    def _check_stock_reduction(self) -> None:
        reduction = self.spec.reduction
        if isinstance(reduction, StockReduction) and reduction.world_size != self._world_size:
            raise SpecError(
                f"reduction.world_size={reduction.world_size} decides the bits of a stock "
                f"reduction, but {self._world_size} ranks were started; set "
                "execution.trainer_ranks to it"
            )

    # -- what a trainer's own library decides, beside the abstract methods of the bases

    @abstractmethod
    def _build(self) -> dict[str, Shard]:
        """Set `_model` and return logical name -> live float32 masters, without values yet."""

    @abstractmethod
    def _take_slot_gradient(self) -> None:
        """Take the gradients of the slot that was just run and add them to the update's."""

    @abstractmethod
    def _take_update_gradient(self) -> dict[str, torch.Tensor]:
        """Return logical name -> this rank's float32 rows of the summed gradient; start afresh."""

    @abstractmethod
    def _forget_gradients(self) -> None:
        """Drop whatever a failed update has left behind; no collective, since one rank may fail."""

    def _with_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of everything that a backward leaves gradients on."""
        yield from self._model.named_parameters()

    @abstractmethod
    def _publish(self) -> None:
        """Bring the weights that the forward sees up to the masters, where they are copies."""

    @property
    @abstractmethod
    def _exact_ops(self) -> frozenset[str]:
        """Ops that may run outside of the shared ones: each gives the same bits in any batch."""

    @property
    def _is_aligned(self) -> bool:
        """Whether the shared ops run, so that no bit may depend on batch, packing or gradients."""
        return self.spec.numerics.policy == "aligned"

    def _resident_tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that lies on the device between two calls, plain (no reference)."""
        for shards in (self._shards, self._state.moments()):
            yield from (shard.local for shard in shards.values())
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            yield tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()

    def _storage(self) -> Storage:
        """How the tensors of a checkpoint are written and read."""
        return DcpStorage()

    # -- updating

    def update(
        self,
        samples: Sequence[TrainSample],
        *,
        step: int,
        update: int,
        flip: Flip | None = None,
        keep_to: str | None = None,
    ) -> UpdateRecord:
        """Run one optimizer step on samples that have been scored.

        A flip is applied by the first update of its step. With `keep_to` rank 0 writes the
        tensors of every probe as `<keep_to>/<probe>.safetensors`.

        Raises:
            EngineError: A sample was not scored, a loss or gradient is not finite, the training
                forward at the sampling weights is not bitwise the score, or something drew from a
                random generator.
        """
        flip = flip if update == 0 else None
        with untouched_generators():
            gradients, figures = self._gradients(samples)
        losses, metrics = self._check_figures(figures, update=update, flip=flip)
        digests = {"loss": {name: digest_floats(name, [loss]) for name, loss in losses.items()}}
        if flip is not None and flip.probe == "grads":
            flip_shard(gradients, flip)
        digests["grads"] = merged_digests(gradients)
        keep_shards(keep_to, "grads", gradients)
        norm = np.array([self._norm(gradients)])
        if flip is not None and flip.probe == "grad_norm":
            flip_bit(norm, flip.element, flip.bit)
        digests["grad_norm"] = {"grad_norm": digest_array("grad_norm", norm)}
        rate = self._step(gradients, float(norm[0]), num_samples=len(samples))
        self._state.step = step
        moments = self._state.moments()
        for probe, shards in (("optimizer", moments), ("weights", self._shards)):
            if flip is not None and flip.probe == probe:
                flip_shard(shards, flip)
            digests[probe] = merged_digests(shards)
            keep_shards(keep_to, probe, shards)
        self._publish()
        digests["optimizer"]["step"] = digest_json(self._optimizer.num_steps)
        if keep_to is not None and self._rank == 0:
            values = {name: torch.tensor([loss]) for name, loss in losses.items()}
            keep_tensors(keep_to, "loss", values)
            keep_tensors(keep_to, "grad_norm", {"grad_norm": torch.from_numpy(norm)})
        before, self._last_weights = self._last_weights, digests["weights"]
        return UpdateRecord(
            digests=digests,
            metrics={**metrics, "train/grad_norm": float(norm[0]), "train/lr": rate},
            changed_weights=sum(
                before[name] != digest for name, digest in self._last_weights.items()
            ),
        )

    def _gradients(
        self, samples: Sequence[TrainSample]
    ) -> tuple[dict[str, Shard], list[SampleFigures]]:
        """Run this rank's slots; return reduced gradients and all samples' figures in order."""
        totals = UpdateTotals.of(samples)
        slots = plan_slot_parts(
            [num_rows(sample) for sample in samples],
            plan_slots(len(samples), num_slots=self.spec.reduction.slots),
            max_rows=self.spec.trainer_options.max_tokens_per_rank,
        )
        mine: list[SampleFigures] = []
        with self._unchanged_weights():
            try:
                for parts in slots[self._rank :: self._world_size]:
                    parted = [[samples[index] for index in part] for part in parts]
                    mine += self._run_slot(parted, totals)
                    self._take_slot_gradient()
                summed = self._take_update_gradient()
            except BaseException:
                self._forget_gradients()  # the next update would add them to its own
                raise
        by_id = {figure.request_id: figure for part in all_objects(mine) for figure in part}
        gradients = {name: shard.like(summed[name]) for name, shard in self._shards.items()}
        return gradients, [by_id[sample.request_id] for sample in samples]

    def _run_slot(
        self, parts: Sequence[Sequence[TrainSample]], totals: UpdateTotals
    ) -> list[SampleFigures]:
        """Forward and backward of one slot, in one or more parts; one sum and one rounding."""
        figures: list[SampleFigures] = []
        sums = numerics.SlotSums()
        for number, samples in enumerate(parts, start=1):
            with sums.part(last=number == len(parts)):
                figures += self._backward(samples, totals)
            if number == 1 < len(parts) and isinstance(self.spec.reduction, TreeReduction):
                require_no_gradient(self._with_gradients())
        return figures

    def _backward(
        self, samples: Sequence[TrainSample], totals: UpdateTotals
    ) -> list[SampleFigures]:
        slot = pack_slot(samples)
        counts = torch.tensor(slot.counts)
        old = scored_rows(self._scores, samples)
        reference = scored_rows(self._reference_scores, samples) if self._reference else None
        logprobs, entropy = self._model(slot)
        weights = [totals.weight(sample, self.spec.loss) for sample in samples]
        terms = token_terms(
            logprobs,
            entropy,
            old=old,
            advantages=torch.tensor([s.advantage for s in samples]).repeat_interleave(counts),
            reference=reference,
            loss=self.spec.loss,
            behaviour=behaviour_logprobs(samples, self.spec.loss),
        )
        slot_loss(terms, torch.tensor(weights).repeat_interleave(counts)).backward()
        return [
            sample_figures(
                sample.request_id,
                terms.part(first, first + count),
                weight=weight,
                logprobs=logprobs[first : first + count],
                old=old[first : first + count],
            )
            for sample, weight, first, count in zip(
                samples, weights, slot.first_tokens, slot.counts, strict=True
            )
        ]

    def _check_figures(
        self, figures: Sequence[SampleFigures], *, update: int, flip: Flip | None
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return (request id and `total` -> float32 loss) and the metrics of the update."""
        metrics = update_metrics(figures)
        mismatches = metrics["train/rescore_mismatches"]
        if update == 0 and mismatches and not self._scores_were_flipped and self._is_aligned:
            worst = next(figure for figure in figures if figure.rescore_mismatches)
            raise EngineError(
                "the training forward differs from the score at the same weights on "
                f"{mismatches:.0f} tokens, first in {worst.request_id}: an op depends on the "
                "packing or on gradients"
            )
        losses = {f.request_id: f.figures["loss"] for f in figures}
        for name, value in losses.items():
            if not math.isfinite(value):
                raise EngineError(f"{name}: the loss is not finite ({value}); nothing was updated")
        losses = {name: round_to_float32(value) for name, value in losses.items()}
        if flip is not None and flip.probe == "loss":
            name = choose_name(losses, flip)
            losses[name] = flip_float32(losses[name], flip.bit)
        losses["total"] = round_to_float32(math.fsum(losses.values()))
        return losses, {**metrics, "train/loss": losses["total"]}

    def _norm(self, gradients: Mapping[str, Shard]) -> float:
        """Return the float64 norm of the whole gradient; EngineError if it is not finite."""
        sums = numerics.many_row_square_sums([shard.local for shard in gradients.values()])
        squares = {
            name: gathered(shard, rows)
            for (name, shard), rows in zip(gradients.items(), sums, strict=True)
        }
        norm = total_norm(list(squares.values()))
        if not math.isfinite(norm):
            name = next(n for n, rows in squares.items() if not bool(torch.isfinite(rows).all()))
            raise EngineError(
                f"the gradient of {name} is not finite (norm {norm}); nothing was updated"
            )
        return norm

    def _step(self, gradients: Mapping[str, Shard], norm: float, *, num_samples: int) -> float:
        """Clip, count the samples, apply AdamW; return the learning rate."""
        coefficient = clip_coefficient(norm, clip_grad=self.spec.optimizer.clip_grad)
        if coefficient < 1:
            torch._foreach_mul_(
                [shard.local for shard in gradients.values()], round_to_float32(coefficient)
            )
        self._state.samples_consumed += num_samples
        rate = learning_rate(
            self._state.samples_consumed, optimizer=self.spec.optimizer, schedule=self.spec.schedule
        )
        self._optimizer.step(
            self._shards,
            {name: shard.local for name, shard in gradients.items()},
            learning_rate=rate,
            weight_decay=weight_decay(self._state.samples_consumed, self.spec.optimizer),
        )
        return rate

    # -- state

    def weight_digests(self) -> dict[str, str]:
        """Name -> digest of the live float32 masters."""
        return self._state.weight_digests()

    def state_digest(self) -> str:
        """Digest of weights, optimizer state and progress; see `TrainingState.digest`."""
        return self._state.digest()

    def load(self, path: str) -> None:
        """Load a checkpoint of this trajectory, or the run's initial folder."""
        self._forget_scores()
        self._state.load(path)
        self._publish()
        self._last_weights = self.weight_digests()

    def save(
        self, path: str, *, chain_digest: str, attempt: int, run_folder: str | None = None
    ) -> str:
        """Write, verify and commit a checkpoint; return its state digest."""
        return self._state.save(
            path, chain_digest=chain_digest, attempt=attempt, run_folder=run_folder
        )

    # -- evidence

    def environment(self) -> dict[str, Any]:
        """What this process really has, and the exact ops that run outside of the shared ones."""
        environment = read_back()
        # Ambient: which copies are made depends on the number of ranks, no bit does.
        ambient = {**environment.get("ambient", {}), "ops_outside_shared": self._ops_outside}
        return {**environment, "ambient": ambient}

    def audit(self) -> tuple[str, ...]:
        """Names of ops outside of the shared ones in one forward; EngineError if not exact.

        Under the stock numerics they are recorded and none is refused.
        """
        tokens = tuple(index % self.spec.model.vocab_size for index in range(8))
        samples = [
            TrainSample(request_id=str(count), prompt_token_ids=tokens[:count], token_ids=tokens)
            for count in (3, 5)
        ]
        slot = pack_slot(samples)
        with torch.no_grad(), OpsOutside() as outside:
            self._model(slot)
        if not self._is_aligned:
            return tuple(sorted(outside.names))
        return require_exact(outside.names, self._exact_ops, where="the trainer's forward")

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
