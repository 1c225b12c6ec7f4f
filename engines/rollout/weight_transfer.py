"""vLLM's weight-transfer API, fed from host memory.

vLLM drives a push by start, update and finish, with a version; this engine takes buckets of
`engines.weights.wire` and copies them, through the model's own `load_weights`, into the storage
that the model computes with. That needs weights that were not packed after loading: so it holds for
engines on the shared ops only, and a packed one refuses (`VllmEngine.receive`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from engines.weights.wire import WireBucket, unpack
from model_specs.errors import EngineError

BACKEND = "lockstep_host"
"""Name in `WeightTransferConfig.backend`."""


@dataclass
class HostInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on before a push from host memory."""


@dataclass
class HostUpdateInfo(WeightTransferUpdateInfo):
    """One bucket of tensors."""

    bucket: WireBucket = field(default_factory=tuple)


class HostWeightTransferEngine(WeightTransferEngine[HostInitInfo, HostUpdateInfo]):
    """Copies host tensors into the model in place."""

    init_info_cls = HostInitInfo
    update_info_cls = HostUpdateInfo

    def init_transfer_engine(self, init_info: HostInitInfo) -> None:
        """Do nothing: there is no connection to open."""

    def start_weight_update(self) -> None:
        """Do nothing: tensors are copied in place as they arrive."""

    def receive_weights(self, update_info: HostUpdateInfo) -> None:
        """Copy one bucket into the model's storage.

        Raises:
            EngineError: The model's loader left out a tensor of the bucket.
        """
        names = {wire.name for wire in update_info.bucket}
        taken: set[str] = set()

        with torch.no_grad():
            # One at a time: the loader answers in fused names, so what it took is seen by counting.
            for name, tensor in unpack(update_info.bucket):
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
        """Refuse: a trainer packs buckets itself, and the driver moves them.

        Raises:
            EngineError: Always; vLLM 0.26 asks for the method and never calls it.
        """
        raise EngineError(
            "weights of this backend are packed by engines.weights.wire and given to "
            "VllmEngine.receive; vLLM does not send them"
        )

    def finish_weight_update(self) -> None:
        """Do nothing: what arrived is in place."""

    def shutdown(self) -> None:
        """Do nothing: there is no connection to close."""


def register_backend() -> None:
    """Make the backend known to vLLM; a second call in one process does nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HostWeightTransferEngine)
