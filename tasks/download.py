"""Bring model, tokenizer and data into the leg's own folder, checked and with a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines.cluster import EngineHandle, gather
from engines.contracts import ArtifactRef
from engines.data import data_file
from engines.environment import telemetry_off_env
from engines.provenance.digest import digest_json
from engines.runs import write_spec
from model_specs.run_spec import RunSpec
from model_specs.sources import is_url, parse_hub
from tasks.session import LegSession, session
from tasks.stage import stage

if TYPE_CHECKING:  # it imports torch, which a driver does without
    from engines.checkpoint.download import Download


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the run starts from."""

    model: ArtifactRef
    data: ArtifactRef
    evals: ArtifactRef | None = None
    """Folder with a folder of data a set of `plan.evals`; None where there is none."""


@stage("download", version=1)
def download(session_name: str) -> Inputs:
    """Materialise the spec's model and data and fill their digests into the spec.

    Raises:
        ArtifactError: A source does not have the digest that the spec already names.
    """
    opened = session(session_name)
    spec = opened.spec
    opened.stage_reused = (opened.folder / "model").is_dir()
    host = opened.trainer_hosts[0]
    is_remote = parse_hub(spec.model.path) is not None or any(
        is_url(source) for source in (spec.data.source, *(s.source or "" for s in spec.plan.evals))
    )
    if is_remote:  # in a process of its own: those of the engines are kept off the network
        host = opened.cluster.start("download-0", env=telemetry_off_env())
    model, data = gather(
        [
            host.run(
                "engines.checkpoint.download:download_model", spec.model, opened.folder / "model"
            ),
            host.run(
                "engines.checkpoint.download:download_data", spec.data, opened.folder / "data"
            ),
        ],
        what="download",
        timeout_s=6 * 3600,
    )
    eval_digests = _download_evals(opened, host)
    if is_remote:
        opened.cluster.stop(host)
    opened.spec = _resolved(spec, model, data, eval_digests)
    write_spec(opened.folder, opened.spec)
    if spec.model.weights_digest is None:  # the first leg resolves the run's spec
        write_spec(opened.run_dir, opened.spec)
    file = data_file(data.folder, split=spec.data.split)
    return Inputs(
        model=ArtifactRef(uri=model.folder, kind="model", digest=model.digest),
        data=ArtifactRef(uri=str(file), kind="data", digest=data.digest),
        evals=ArtifactRef(
            uri=str(opened.folder / "eval-data"), kind="evals", digest=digest_json(eval_digests)
        )
        if eval_digests
        else None,
    )


def _download_evals(opened: LegSession, host: EngineHandle) -> dict[str, str]:
    """Bring the data of the evaluation sets; return name -> digest."""
    waiting = {
        chosen.name: host.run(
            "engines.checkpoint.download:download_data",
            chosen.data_of(opened.spec.data),
            opened.folder / "eval-data" / chosen.name,
        )
        for chosen in opened.spec.plan.evals
    }
    found = gather(list(waiting.values()), what="download of the evals")
    return {name: each.digest for name, each in zip(waiting, found, strict=True)}


def _resolved(
    spec: RunSpec, model: Download, data: Download, eval_digests: Mapping[str, str]
) -> RunSpec:
    """Return the spec with the digests of what was found, and a branch pinned to its commit."""
    found = {
        "path": model.pinned_source,
        "weights_digest": model.weights_digest,
        "tokenizer_digest": model.tokenizer_digest,
    }
    evals = tuple(
        chosen.model_copy(update={"digest": eval_digests[chosen.name]})
        for chosen in spec.plan.evals
    )
    return spec.model_copy(
        update={
            "model": spec.model.model_copy(update=found),
            "data": spec.data.model_copy(update={"digest": data.digest}),
            "plan": spec.plan.model_copy(update={"evals": evals}),
        }
    )
