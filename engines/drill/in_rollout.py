"""Faults in a rollout engine's process, each on the live engine; entered by `engines.drill.live`.

What each does and what catches it is in `engines.drill.catalogue`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

import engines.rollout.vllm_engine as engine_module
from engines import numerics
from engines.contracts import Sample
from engines.drill.live import replaced
from engines.provenance.descent import natural_order
from engines.provenance.tensor_digest import digest_tensor
from engines.rollout.vllm_engine import VllmEngine
from engines.rollout.weight_transfer import InPlaceWeightTransferEngine

Breaker = Iterator[None]
Samples = list[Sample]

OTHER_THETA = 20000.0
FEW_ROWS = 40
"""Rows of a forward up to which the other kernel is taken: those of decoding."""
UNLOADED = "model.layers.1.mlp.up_proj.weight"


# -- answers


@contextmanager
def _answering(engine: VllmEngine, change: Callable[[Samples], Samples]) -> Breaker:
    """Change what the engine answers, after it was drawn."""
    honest = engine.generate
    with replaced(engine, "generate", lambda *args, **kw: change(honest(*args, **kw))):
        yield


@contextmanager
def _first_sample(engine: VllmEngine, change: Callable[[Sample], Sample]) -> Breaker:
    """Change the answer to the first request, in the order of a comparison."""

    def changed(samples: Samples) -> Samples:
        first = min((sample.request_id for sample in samples), key=natural_order)
        return [change(s) if s.request_id == first else s for s in samples]

    with _answering(engine, changed):
        yield


def _with_logprob(sample: Sample, change: Callable[[float], float]) -> Sample:
    return replace(sample, logprobs=(change(sample.logprobs[0]), *sample.logprobs[1:]))


@contextmanager
def token_changed(engine: VllmEngine) -> Breaker:
    def changed(sample: Sample) -> Sample:
        return replace(sample, token_ids=(sample.token_ids[0] ^ 1, *sample.token_ids[1:]))

    with _first_sample(engine, changed):
        yield


@contextmanager
def samples_swapped(engine: VllmEngine) -> Breaker:
    def swapped(samples: Samples) -> Samples:
        ordered = sorted(samples, key=lambda sample: natural_order(sample.request_id))
        first, second = ordered[:2]
        names = {first.request_id: second, second.request_id: first}
        return [
            replace(names[s.request_id], request_id=s.request_id, sample_index=s.sample_index)
            if s.request_id in names
            else s
            for s in samples
        ]

    with _answering(engine, swapped):
        yield


@contextmanager
def log_prob_one_ulp(engine: VllmEngine) -> Breaker:
    def next_float(value: float) -> float:
        return float(np.nextafter(np.float32(value), np.float32(-math.inf)))

    with _first_sample(engine, lambda sample: _with_logprob(sample, next_float)):
        yield


@contextmanager
def nan_log_prob(engine: VllmEngine) -> Breaker:
    with _first_sample(engine, lambda sample: _with_logprob(sample, lambda _: math.nan)):
        yield


@contextmanager
def nan_masked(engine: VllmEngine) -> Breaker:
    def masked(_: float) -> float:
        return float(torch.nan_to_num(torch.tensor(math.nan)))

    with _first_sample(engine, lambda sample: _with_logprob(sample, masked)):
        yield


@contextmanager
def answer_lost(engine: VllmEngine) -> Breaker:
    with _answering(engine, lambda samples: samples[1:]):
        yield


@contextmanager
def raw_log_probs(engine: VllmEngine) -> Breaker:
    honest, temperature = numerics.log_softmax_rows, engine._spec.sampling.temperature

    def before_temperature(logits: torch.Tensor) -> torch.Tensor:
        return honest(logits * temperature)

    with replaced(numerics, "log_softmax_rows", before_temperature):
        yield


@contextmanager
def seed_tied_to_replica(engine: VllmEngine) -> Breaker:
    honest = engine_module.sampling_params

    def shifted(sampling: Any, request: Any, **options: Any) -> Any:
        request = replace(request, seed=request.seed + 1 + engine._engine_index)
        return honest(sampling, request, **options)

    with replaced(engine_module, "sampling_params", shifted):
        yield


@contextmanager
def only_truncated_responses(engine: VllmEngine) -> Breaker:
    honest = engine_module.sampling_params

    def two_tokens(sampling: Any, request: Any, **options: Any) -> Any:
        params = honest(sampling, request, **options)
        params.max_tokens = 2
        params.ignore_eos, params.stop_token_ids = True, []
        return params

    with (
        replaced(engine_module, "sampling_params", two_tokens),
        replaced(engine, "_stop_token_ids", ()),
    ):
        yield


# -- weights


@contextmanager
def stale_weights(engine: VllmEngine) -> Breaker:
    with replaced(InPlaceWeightTransferEngine, "receive_weights", lambda *_: None):
        yield


@contextmanager
def stale_weights_behind_echoed_digests(engine: VllmEngine) -> Breaker:
    receiver, end = engine._receiver, engine.end_push
    assert receiver is not None, "the drill's engines are connected"
    take = receiver.take
    arrived: dict[str, str] = {}

    def noted(index: int, payload: Any) -> Any:
        tensors = take(index, payload)
        arrived.update((name, digest_tensor(name, tensor)) for name, tensor in tensors)
        return tensors

    def echoed(**options: Any) -> dict[str, str]:
        end(**options)
        return dict(arrived)

    with (
        stale_weights(engine),
        replaced(receiver, "take", noted),
        replaced(engine, "end_push", echoed),
    ):
        yield


@contextmanager
def weights_pushed_twice(engine: VllmEngine) -> Breaker:
    honest = engine.take_bucket

    def twice(index: int, payload: Any = None) -> int:
        honest(index, payload)
        return honest(index, payload)

    with replaced(engine, "take_bucket", twice):
        yield


@contextmanager
def prefix_cache_not_reset(engine: VllmEngine) -> Breaker:
    with replaced(engine, "reset_prefix_cache", lambda: None):
        yield


@contextmanager
def one_tensor_not_loaded(engine: VllmEngine) -> Breaker:
    model = engine._model()
    honest = model.load_weights

    def without(weights: Any) -> Any:
        pairs = list(weights)
        return {UNLOADED} if pairs[0][0] == UNLOADED else honest(pairs)

    with replaced(model, "load_weights", without):
        yield


@contextmanager
def qkv_bias_order(engine: VllmEngine) -> Breaker:
    honest = InPlaceWeightTransferEngine.receive_weights
    prefix = "model.layers.0.self_attn"

    def exchanged(self: InPlaceWeightTransferEngine, update: Any) -> None:
        honest(self, update)
        stored = engine._stored()
        with torch.no_grad():
            key, value = stored[f"{prefix}.k_proj.bias"], stored[f"{prefix}.v_proj.bias"]
            kept = key.clone()
            key.copy_(value)
            value.copy_(kept)

    with replaced(InPlaceWeightTransferEngine, "receive_weights", exchanged):
        yield


@contextmanager
def tied_head_untied(engine: VllmEngine) -> Breaker:
    head = engine._model().get_submodule("lm_head")
    tied = head.weight
    head.weight = torch.nn.Parameter(tied.detach().clone(), requires_grad=False)
    try:
        yield
    finally:
        head.weight = tied


# -- arithmetic


@contextmanager
def rope_theta(engine: VllmEngine) -> Breaker:
    with ExitStack() as stack:
        for module in engine._model().modules():
            if hasattr(module, "shared_inv_freq"):
                other = numerics.rotary_inv_freq(OTHER_THETA, module.head_size)
                stack.enter_context(replaced(module, "shared_inv_freq", other))
        yield


@contextmanager
def kernel_chosen_by_batch_size(engine: VllmEngine) -> Breaker:
    """Few rows are multiplied in two parts of the inner dimension, as a split-K kernel does."""
    honest = numerics.linear

    def by_rows(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if x.shape[0] > FEW_ROWS:
            return honest(x, weight, bias)
        half = x.shape[1] // 2
        first = honest(x[:, :half].contiguous(), weight[:, :half].contiguous(), bias)
        second = honest(x[:, half:].contiguous(), weight[:, half:].contiguous(), None)
        return numerics.add(first, second)

    with replaced(numerics, "linear", by_rows):
        yield


@contextmanager
def op_outside_of_the_shared_ones(engine: VllmEngine) -> Breaker:
    with replaced(numerics, "linear", torch.nn.functional.linear):
        yield


@contextmanager
def one_layer_off_by_an_ulp(engine: VllmEngine) -> Breaker:
    def off(_: torch.nn.Module, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> Any:
        summed = numerics.add(*output).clone()
        summed.view(torch.int16)[..., 0] += 1
        return torch.zeros_like(summed), summed

    layers = list(engine._model().get_submodule("model.layers").children())
    handle = layers[1].register_forward_hook(off)
    try:
        yield
    finally:
        handle.remove()


# -- inputs and the process


@contextmanager
def _other_files(change: Callable[[Path], None]) -> Breaker:
    """Let the tokenizer be loaded from a copy of the model's folder that was changed."""
    honest = AutoTokenizer.from_pretrained
    with TemporaryDirectory() as scratch:

        def from_copy(folder: str, *args: Any, **options: Any) -> Any:
            copy = Path(copytree(folder, Path(scratch) / "model", dirs_exist_ok=True))
            change(copy)
            return honest(str(copy), *args, **options)

        with replaced(AutoTokenizer, "from_pretrained", from_copy):
            yield


@contextmanager
def other_tokenizer(engine: VllmEngine) -> Breaker:
    def exchanged(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
        path.write_text(json.dumps(content), encoding="utf-8")

    with _other_files(exchanged):
        yield


@contextmanager
def other_template(engine: VllmEngine) -> Breaker:
    def reworded(folder: Path) -> None:
        path = folder / "tokenizer_config.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content["chat_template"] = content["chat_template"].replace("assistant", "helper")
        path.write_text(json.dumps(content), encoding="utf-8")

    with _other_files(reworded):
        yield


@contextmanager
def _variable(name: str, value: str | None) -> Breaker:
    kept = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if kept is not None:
            os.environ[name] = kept


@contextmanager
def flag_set_in_the_wrong_process(engine: VllmEngine) -> Breaker:
    with _variable("LOCKSTEP_NUMERICS", None):
        yield


@contextmanager
def variable_overwritten(engine: VllmEngine) -> Breaker:
    with _variable("OMP_NUM_THREADS", "7"):
        yield
