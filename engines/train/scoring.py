"""What one trainer rank does to score samples: forwards without gradients, packed, dealt to ranks.

Invariant: no log-prob depends on which samples are packed with it, nor on the number of ranks.
A forward is a collective, so every rank runs as many as the others.

    root = trainer.score(samples)
    logprobs = trainer.scores()["sample"]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from engines.contracts import Flip, TrainSample
from engines.faults import choose_name, flip_bit
from engines.gates.layerwise import TRAINER_FILE, recorded, write_states
from engines.provenance.digest import digest_floats, root_digest
from engines.train.reference import Reference
from engines.train.shards import Shard, all_objects
from engines.train.slots import num_rows, pack_slot, plan_micro_batches
from model_specs.errors import EngineError
from model_specs.run_spec import RunSpec


class Scores(ABC):
    """The part of a trainer rank that scores; its updates read what it leaves behind."""

    spec: RunSpec
    _rank: int
    _world_size: int
    _model: torch.nn.Module
    """Takes a `PackedSlot` and returns (log-probs, entropy), float32 [T] each."""
    _shards: dict[str, Shard]
    _reference: Reference | None
    _scores: dict[str, torch.Tensor]
    """Request id -> log-probs of the last `score`, float32 [tokens of the sample]."""
    _reference_scores: dict[str, torch.Tensor]
    """The same under the reference; empty where none is held."""
    _scores_were_flipped: bool

    @abstractmethod
    def _decoder_layers(self) -> list[torch.nn.Module]:
        """Return the decoder layers in order."""

    def _unchanged_weights(self) -> AbstractContextManager[None]:
        """Stand around several forwards of the same weights, and their backwards."""
        return nullcontext()

    def _forget_scores(self) -> None:
        """Hold no scores, as before the first `score`."""
        self._scores, self._reference_scores = {}, {}
        self._scores_were_flipped = False

    def score(self, samples: Sequence[TrainSample], *, flip: Flip | None = None) -> str:
        """Score all samples at the current weights; return the root digest of the log-probs.

        Where a reference is held, its log-probs are computed too and kept for the updates.

        Raises:
            EngineError: Two samples have one request id, or a sample has no tokens.
        """
        if len({sample.request_id for sample in samples}) != len(samples):
            raise EngineError("request ids of the samples to score are not unique")
        self._scores = self._score_all(samples)
        self._scores_were_flipped = flip is not None and flip.probe == "train_logprobs"
        if flip is not None and self._scores_were_flipped:
            flip_bit(self._scores[choose_name(self._scores, flip)], flip.element, flip.bit)
        self._reference_scores = {}
        if self._reference is not None:
            with self._reference.swapped_in(self._shards):
                self._reference_scores = self._score_all(samples)
        return root_digest({name: digest_floats(name, row) for name, row in self.scores().items()})

    def scores(self) -> dict[str, tuple[float, ...]]:
        """Reveal request id -> log-probs (float32 values) of the last `score`."""
        return {name: tuple(row.tolist()) for name, row in self._scores.items()}

    def reference_scores(self) -> dict[str, tuple[float, ...]]:
        """Request id -> log-probs under the reference; empty where none is held."""
        return {name: tuple(row.tolist()) for name, row in self._reference_scores.items()}

    def _score_all(self, samples: Sequence[TrainSample]) -> dict[str, torch.Tensor]:
        plan = plan_micro_batches(
            [num_rows(sample) for sample in samples],
            max_rows=self.spec.trainer_options.max_tokens_per_rank,
            max_samples=self.spec.samples_per_update // self.spec.reduction.slots,
        )
        chunks = [[samples[index] for index in indices] for indices in plan]
        mine: dict[str, torch.Tensor] = {}
        with torch.no_grad(), self._unchanged_weights():
            for first in range(0, len(chunks), self._world_size):
                # A forward is a collective: a rank without a chunk repeats the last one.
                slot = pack_slot(chunks[min(first + self._rank, len(chunks) - 1)])
                logprobs, _ = self._model(slot)
                mine |= {
                    name: row.clone()
                    for name, row in zip(slot.request_ids, slot.split(logprobs), strict=True)
                }
        merged = {name: row for part in all_objects(mine) for name, row in part.items()}
        return {sample.request_id: merged[sample.request_id] for sample in samples}

    def layer_states(self, samples: Sequence[TrainSample], *, folder: str) -> None:
        """Write every layer's hidden states of these samples for the layer-wise gate; rank 0's."""
        states = {}
        for sample in samples:
            slot = pack_slot([sample])
            with torch.no_grad(), recorded(self._decoder_layers()) as outputs:
                self._model(slot)
            found = torch.stack([torch.cat(rows) for rows in outputs])
            states[sample.request_id] = found[:, : slot.lengths[0]].clone()
        if self._rank == 0:
            write_states(Path(folder) / TRAINER_FILE, states)
