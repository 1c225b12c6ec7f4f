"""vLLM's weight-transfer API, fed with tensors that have arrived.

vLLM drives a push by start, update and finish, with a version; this engine takes the tensors of a
bucket (`engines.weights.transport` brings them, by whatever way) and copies them, through the
model's own `load_weights`, into the storage that the model computes with. That needs weights that
were not packed after loading: so it holds for engines on the shared ops only, and a packed one
refuses (`engines.rollout.receiving`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from model_specs.errors import EngineError

BACKEND = "lockstep"
"""Name in `WeightTransferConfig.backend`."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: the receiver is opened outside of vLLM."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The tensors of one bucket."""

    tensors: Sequence[tuple[str, torch.Tensor]] = ()


class InPlaceWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Copies tensors, from any device, into the model in place."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: there is no connection to open."""

    def start_weight_update(self) -> None:
        """Do nothing: tensors are copied in place as they arrive."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Copy one bucket into the model's storage.

        Raises:
            EngineError: The model's loader left out a tensor of the bucket.
        """
        names = {name for name, _ in update_info.tensors}
        taken: set[str] = set()

        with torch.no_grad():
            # One at a time: the loader answers in fused names, so what it took is seen by counting.
            for name, tensor in update_info.tensors:
                if self.model.load_weights([(name, tensor)]):
                    taken.add(name)
        if taken != names:
            raise EngineError(
                f"vLLM's loader of {type(self.model).__name__} took {len(taken)} of {len(names)} "
                "tensors; "
                f"left out: {', '.join(sorted(names - taken))}"
            )

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: a trainer fills buckets itself, and the driver conducts the push.

        Raises:
            EngineError: Always; vLLM 0.26 asks for the method and never calls it.
        """
        raise EngineError(
            "weights of this backend are sent by engines.weights.push; vLLM does not send them"
        )

    def finish_weight_update(self) -> None:
        """Do nothing: what arrived is in place."""

    def shutdown(self) -> None:
        """Do nothing: there is no connection to close."""


def register_backend() -> None:
    """Make the backend known to vLLM; a second call in one process does nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, InPlaceWeightTransferEngine)
