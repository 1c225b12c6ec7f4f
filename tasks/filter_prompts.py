"""The filter stage: draw from the initial weights, keep the prompts in the band, and record both.

Runs after the engines have started and before the first step. What was kept goes into the lock and
the spec (`filter.kept_ids`, `filter.kept_digest`), what was found of each prompt into `filter.json`
of the leg. A resumed leg takes what that file says and draws nothing; the second leg of a twin
draws again. What differs from the spec is Diverged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from engines import prompt_filter
from engines.contracts import ArtifactRef, Prompt, Sample
from engines.loop import push
from engines.rewards import metadata_of, score_samples
from engines.runs import write_json, write_spec
from model_specs.errors import ArtifactError
from model_specs.json_text import read_json
from tasks.session import LegSession, session
from tasks.stage import stage

logger = logging.getLogger("lockstep")

FILE = "filter.json"
PROMPTS_AT_ONCE = 64
"""Between two such parts the progress is told; where they are cut decides no bit."""


@stage("filter", version=1)
def filter_prompts(session_name: str, weights: ArtifactRef, *, again: bool = True) -> ArtifactRef:
    """Leave only the prompts of the band in the session.

    Args:
        session_name: The leg's session.
        weights: The initial weights; the trainer is brought to them before anything is drawn.
        again: Draw even where the spec already says what was kept; else take that.

    Raises:
        SpecError: No prompt is in the band.
        DivergedError: The spec already names what was kept, and now it is something else.
        ArtifactError: A resumed leg has lost its `filter.json`, or it is not what the spec says.
    """
    opened = session(session_name)
    spec = opened.spec
    assert spec.filter is not None
    path = opened.folder / FILE
    if path.is_file():
        kept, digest = _recorded(path)
    elif spec.filter.kept_digest is not None and not again:
        kept, digest = spec.filter.kept_ids, spec.filter.kept_digest
        write_json(path, {"kept_ids": list(kept), "kept_digest": digest, "prompts": []})
    else:
        kept, digest = _drawn(opened, weights, path)
    prompt_filter.require_same(spec.filter, kept, digest)
    filled = spec.filter.model_copy(update={"kept_ids": kept, "kept_digest": digest})
    opened.spec = spec.model_copy(update={"filter": filled})
    _, _, prompts = opened.engines()
    opened.prompts = prompt_filter.narrowed(prompts, kept)
    write_spec(opened.folder, opened.spec)
    if spec.filter.kept_digest is None:  # the first leg resolves the run's spec
        write_spec(opened.run_dir, opened.spec)
    return ArtifactRef(uri=str(path), kind="prompts", digest=digest)


def _drawn(opened: LegSession, weights: ArtifactRef, path: Path) -> tuple[tuple[str, ...], str]:
    spec = opened.spec
    assert spec.filter is not None
    trainer, rollout, prompts = opened.engines()
    trainer.ensure_at(weights.uri, weights.digest)
    push(trainer, rollout, version=0, flip=None, keep=None)
    chosen = prompt_filter.candidates(prompts, spec.filter)
    samples: list[Sample] = []
    rewards: list[float] = []
    for first in range(0, len(chosen), PROMPTS_AT_ONCE):
        part = chosen[first : first + PROMPTS_AT_ONCE]
        drawn = rollout.generate(prompt_filter.filter_requests(part, spec))
        samples += drawn
        rewards += _rewards(opened, part, drawn)
        logger.info("%s filter %d of %d prompts", opened.leg, first + len(part), len(chosen))
    rates = prompt_filter.pass_rates(chosen, rewards, spec.filter)
    kept = prompt_filter.kept_prompts(rates, spec.filter)
    digest = prompt_filter.filter_digest(kept, samples, rewards)
    rows = [{**asdict(rate), "rate": rate.rate, "kept": rate.prompt_id in kept} for rate in rates]
    write_json(path, {"kept_ids": list(kept), "kept_digest": digest, "prompts": rows})
    logger.info(
        "%s filter kept %d of %d prompts with a pass rate in [%s, %s]",
        *(opened.leg, len(kept), len(chosen), spec.filter.low, spec.filter.high),
    )
    return kept, digest


def _rewards(
    opened: LegSession, prompts: Sequence[Prompt], samples: Sequence[Sample]
) -> tuple[float, ...]:
    labels = {prompt.prompt_id: prompt.label for prompt in prompts}
    return score_samples(samples, labels, opened.spec.reward, metadata=metadata_of(prompts))


def _recorded(path: Path) -> tuple[tuple[str, ...], str]:
    """Read what an earlier attempt of this leg has kept."""
    try:
        found = read_json(path)
        return tuple(found["kept_ids"]), str(found["kept_digest"])
    except (KeyError, TypeError, ArtifactError) as error:
        raise ArtifactError(
            f"{path} is damaged: {error!r}; delete it, and the filter draws again"
        ) from error
