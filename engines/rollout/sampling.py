"""From the spec's sampling to vLLM's, and from vLLM's answer to a `Sample`.

Invariants: every end-of-sequence id that the model folder names anywhere ends a completion; the
sampled end-of-sequence token stays in `token_ids` and has a log-prob; ids and log-probs have one
length, and each log-prob belongs to the id beside it, or the run stops here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.contracts import Sample, SampleRequest
from model_specs.errors import EngineError
from model_specs.run_spec import SamplingSpec

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


def end_of_sequence_ids(model_dir: str, tokenizer: Any) -> tuple[int, ...]:
    """Return all end-of-sequence ids of a model folder, ascending.

    The union of `eos_token_id` in generation_config.json, in config.json, and of the tokenizer:
    chat models end a turn with another token than a document, and name the two in different files.

    Args:
        model_dir: Hugging Face folder.
        tokenizer: Loaded tokenizer; its `eos_token_id` may be None.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir, name)
        if not path.is_file():
            continue
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    return tuple(sorted(found))


def sampling_params(
    sampling: SamplingSpec, request: SampleRequest, *, stop_token_ids: Iterable[int]
) -> SamplingParams:
    """Return vLLM's parameters of one request.

    Processed log-probs are those of the distribution that was drawn from, that is
    `log_softmax(float32(logits) / temperature)` where the whole vocabulary is kept. Until
    there are `min_new_tokens` tokens vLLM sets the logits of all `stop_token_ids` to minus
    infinity, and looks for no stop string.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        seed=request.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        stop=list(sampling.stop),
        stop_token_ids=list(stop_token_ids),
        # 0: only the sampled token's own log-prob.
        logprobs=0,
        ignore_eos=False,
        # vLLM's default builds an answer of all tokens so far for every new token.
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def to_sample(
    request: SampleRequest,
    output: RequestOutput,
    *,
    stop_token_ids: tuple[int, ...],
    min_new_tokens: int = 0,
) -> Sample:
    """Return what vLLM drew for a request, checked.

    Args:
        request: What was asked for.
        output: vLLM's finished answer.
        stop_token_ids: Ids that had to end the completion.
        min_new_tokens: Number of tokens before which they had no probability.

    Raises:
        EngineError: The request ended for another reason than stop or length, numbers of ids and
            log-probs differ, or a sampled id has no log-prob of its own.
    """
    where = f"request {request.request_id}"
    if tuple(output.prompt_token_ids or ()) != request.prompt_token_ids:
        raise EngineError(f"{where}: vLLM answered for another prompt than it was given")
    completion = output.outputs[0]
    token_ids = tuple(completion.token_ids)
    if completion.finish_reason not in ("stop", "length"):
        raise EngineError(
            f"{where} ended by {completion.finish_reason!r} after {len(token_ids)} tokens; only "
            "stop and "
            "length are completions"
        )
    check_stopped(where, token_ids, completion.finish_reason, stop_token_ids=stop_token_ids)
    return Sample(
        request_id=request.request_id,
        prompt_id=request.prompt_id,
        sample_index=request.sample_index,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=token_ids,
        logprobs=chosen_logprobs(where, token_ids, completion.logprobs),
        text=completion.text,
        finish_reason=completion.finish_reason,
        stop_token=_stop_token(completion.finish_reason, completion.stop_reason, token_ids),
        forbidden_ids=stop_token_ids if min_new_tokens else (),
        forbidden_until=min_new_tokens,
    )


def chosen_logprobs(
    where: str, token_ids: tuple[int, ...], rows: Iterable[Mapping[int, Any]] | None
) -> tuple[float, ...]:
    """Return the float32 log-prob of each sampled id; NaN is kept for the gate to judge.

    Args:
        where: Named in an error.
        token_ids: Sampled ids.
        rows: A position each: token id -> object with `logprob`.

    Raises:
        EngineError: There are no rows, another number of rows than ids, or a row without its id.
    """
    if rows is None:
        raise EngineError(f"{where}: vLLM returned no log-probs for {len(token_ids)} tokens")
    positions = list(rows)
    if len(positions) != len(token_ids):
        raise EngineError(
            f"{where}: {len(token_ids)} token ids but {len(positions)} log-probs; every sampled "
            "token "
            "must be scored exactly once"
        )
    values = []
    for position, (token_id, row) in enumerate(zip(token_ids, positions, strict=True)):
        if token_id not in row:
            raise EngineError(
                f"{where}: token {token_id} at position {position} has no log-prob; there are "
                "some of "
                f"{sorted(row)}"
            )
        values.append(float(row[token_id].logprob))
    return tuple(values)


def check_stopped(
    where: str, token_ids: tuple[int, ...], finish_reason: str, *, stop_token_ids: Iterable[int]
) -> None:
    """Require that the first end-of-sequence id that was sampled ended the completion.

    Raises:
        EngineError: An id of `stop_token_ids` stands before the end, or at the end of a completion
            that counts as cut off by its length.
    """
    stops = frozenset(stop_token_ids)
    for position, token_id in enumerate(token_ids):
        is_last = position == len(token_ids) - 1
        if token_id in stops and not (is_last and finish_reason == "stop"):
            raise EngineError(
                f"{where}: end-of-sequence token {token_id} at position {position} of "
                f"{len(token_ids)} did not end the completion (finish reason {finish_reason!r}); "
                f"ids that must end one: {sorted(stops)}"
            )


def _stop_token(
    finish_reason: str, stop_reason: int | str | None, token_ids: tuple[int, ...]
) -> int | str | None:
    # vLLM gives no reason where its primary end-of-sequence id stopped: it is the last token then.
    if finish_reason == "stop" and stop_reason is None and token_ids:
        return token_ids[-1]
    return stop_reason
