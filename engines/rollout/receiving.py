"""What one rollout engine does in a push: take bucket after bucket, then read back what it holds.

Invariant: nothing is loaded before it is known that every tensor will come, once, with its shape
and in the engine's dtype; what is digested as received is read from the storage that the model
computes with, on its device.

    engine.begin_push(layout, attachment)
    engine.take_bucket(0, payload)
    digests = engine.end_push(version=3)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from engines.contracts import Flip
from engines.faults import choose_name, flip_bit
from engines.provenance.tensor_digest import digest_tensors
from engines.weights.layout import Layout, TensorMeta
from engines.weights.names import ModelFacts, check_complete, logical_views
from engines.weights.transport import HostReceiver, Receiver, open_receiver
from engines.weights.wire import resolve
from model_specs.errors import EngineError, UnsupportedError
from model_specs.run_spec import RunSpec


class ReceivesWeights:
    """The part of `engines.rollout.vllm_engine.VllmEngine` that is given weights."""

    _spec: RunSpec
    _engine_index: int
    _policy: str
    _dtype: str
    _on_cpu: bool
    _facts: ModelFacts
    _expected: dict[str, tuple[int, ...]]
    _llm: Any
    _version: str | None
    _receiver: Receiver | None = None
    _is_updating = False
    """Between start and finish of vLLM's weight update."""
    _buckets = 0
    """Of the push that goes on."""
    _due = 0
    """Bucket that has to come next."""

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        raise NotImplementedError

    def connect(self, transport: str, *, engines: int, rendezvous: str) -> None:
        """Open this engine's end of the way from the trainer; see `engines.weights.push`."""
        self._receiver = open_receiver(
            transport,
            device=self._spec.execution.device,
            engine_index=self._engine_index,
            engines=engines,
            rendezvous=rendezvous,
        )

    def begin_push(self, layout: Layout, attachment: Any = None) -> None:
        """Start a push.

        Raises:
            EngineError: A tensor is missing, unknown, there twice, or of another shape or dtype
                (then nothing was loaded), or trainer and engines are not connected.
            UnsupportedError: The policy is native: vLLM packs its weights away after loading.
        """
        if self._policy == "native":
            raise UnsupportedError(
                "a native engine packs its weights after loading, so that a push would reach only "
                "some of them and could not be read back; start it on an exported folder instead"
            )
        if self._receiver is None:
            raise EngineError("trainer and engines are not connected; call connect first")
        metas = [meta for bucket in layout for meta in bucket]
        check_complete([(meta.name, meta.shape) for meta in metas], self._expected)
        other = sorted({f"{meta.name} {meta.dtype}" for meta in metas if meta.dtype != self._dtype})
        if other:
            raise EngineError(
                f"{len(other)} tensors are not {self._dtype}, first {other[0]}; the sender casts "
                "to the wire dtype, the engine never does"
            )
        self._receiver.begin(layout, attachment)
        if self._is_updating:  # a push that was broken off; this one brings every tensor again
            self._finish(self._version)
        self._buckets, self._due = len(layout), 0
        self._llm.start_weight_update()
        self._is_updating = True

    def take_bucket(self, index: int, payload: Any = None) -> int:
        """Copy one bucket into the model; return its index when it may be overwritten.

        Raises:
            EngineError: It is not the bucket that is due, or vLLM's loader left out a tensor.
        """
        assert self._receiver is not None, "take_bucket before begin_push"
        if index != self._due:
            raise EngineError(
                f"bucket {index} of the push arrived where {self._due} was due, so one is there "
                "twice or missing; the driver gives every engine every bucket once, in order"
            )
        self._due += 1
        tensors = self._receiver.take(index, payload)
        self._llm.update_weights({"update_info": {"tensors": tensors}})
        if not self._on_cpu:  # the copies have only been launched
            torch.cuda.synchronize()
        return index

    def end_push(
        self, *, version: int, flip: Flip | None = None, keep_to: str | None = None
    ) -> dict[str, str]:
        """End a push; return logical name -> digest of what is stored.

        Args:
            version: Step whose weights these are.
            flip: With probe `received`, this bit of the stored tensor is flipped before it is read.
            keep_to: Folder where `received.safetensors` is written with the stored tensors.

        Raises:
            EngineError: A bucket is missing, or vLLM did not drop its prefix cache.
        """
        assert self._receiver is not None, "end_push before begin_push"
        if self._due != self._buckets:
            raise EngineError(
                f"the push ended after {self._due} of {self._buckets} buckets; the engine holds "
                "old and new weights, so push again"
            )
        self._receiver.end()
        self._finish(str(version))
        self.reset_prefix_cache()
        stored = self._stored()
        if flip is not None and flip.probe == "received":
            flip_bit(stored[choose_name(stored, flip)], flip.element, flip.bit)
        if keep_to is not None:
            _keep(stored, Path(keep_to) / "received.safetensors")
        return digest_tensors(stored)

    def _finish(self, version: str | None) -> None:
        """Let vLLM leave the update that it is in."""
        if self._on_cpu:
            self._llm.finish_weight_update(weight_version=version)
            self._version = self._llm.get_weight_version()
        else:  # vLLM 0.26 keeps no version of its own
            self._llm.finish_weight_update()
            self._version = version
        self._is_updating = False

    def receive(
        self,
        buckets: Iterable[Any],
        *,
        version: int,
        flip: Flip | None = None,
        keep_to: str | None = None,
    ) -> dict[str, str]:
        """Take a full set of weights that lies in host memory; return what `end_push` does.

        Args:
            buckets: `engines.weights.wire` buckets or references to them.
            version: As in `end_push`.
            flip: As in `end_push`.
            keep_to: As in `end_push`.

        Raises:
            EngineError: As in `begin_push` and `take_bucket`.
            UnsupportedError: As in `begin_push`.
        """
        resolved = resolve(buckets)
        layout = tuple(
            tuple(
                TensorMeta(name=wire.name, dtype=wire.dtype, shape=tuple(wire.shape))
                for wire in bucket
            )
            for bucket in resolved
        )
        connected, self._receiver = self._receiver, HostReceiver()
        try:
            self.begin_push(layout)
            for index, bucket in enumerate(resolved):
                self.take_bucket(index, bucket)
            return self.end_push(version=version, flip=flip, keep_to=keep_to)
        finally:
            self._receiver = connected

    def received_digests(self) -> dict[str, str]:
        """Return logical name -> digest of the weights, read from the engine's storage now."""
        return digest_tensors(self._stored())

    def weight_version(self) -> str | None:
        """Return the version of the last push, `loaded` for a native engine, None before a push."""
        return self._version

    def _stored(self) -> dict[str, torch.Tensor]:
        model = self._model()
        stored = dict(logical_views(model.named_parameters(), self._facts))
        check_complete([(name, tuple(view.shape)) for name, view in stored.items()], self._expected)
        return stored

    def _model(self) -> torch.nn.Module:
        models: list[torch.nn.Module] = self._llm.apply_model(lambda model: model)
        return models[0]


def _keep(stored: Mapping[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    # Rows of one fused matrix share its storage, which the format refuses; a copy has its own.
    save_file({name: tensor.contiguous().clone() for name, tensor in stored.items()}, path)
