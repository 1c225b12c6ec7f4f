"""The capability table: what no trainer does is refused by its row's name before a start."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import engines.train.registry as registry
from engines.gates.preflight import require_allowed
from engines.provenance.fence import Fence
from engines.provenance.verdict import Verdict
from engines.train.registry import CAPABILITIES, TRAINERS, check_supported, refusals
from model_specs.errors import SpecError, UnsupportedError
from model_specs.fingerprint import trajectory_fingerprint
from model_specs.model_spec import ModelSpec
from model_specs.overrides import apply_overrides
from model_specs.recipes.tiny_cpu import recipe
from model_specs.registry import RECIPES, load_recipe
from model_specs.run_spec import RunSpec
from model_specs.trainer_options import TrainerOptions
from tasks.session import leg_session

ROOT = Path(__file__).resolve().parents[3]

REFUSED = {
    "tensor parallel": "tensor_parallel=2",
    "pipeline parallel": "pipeline_parallel=2",
    "context parallel": "context_parallel=2",
    "expert parallel": "expert_parallel=2",
    "CPU offload": "cpu_offload=true",
    "critic": "critic=true",
    "teacher distillation": "teacher_distillation=true",
    "draft-model training": "draft_model_training=true",
    "routing replay": "routing_replay=true",
    "LoRA": "lora=true",
    "asynchronous rollout": "asynchronous=true",
    "multi-turn": "multi_turn=true",
    "supervised fine-tuning": "supervised=true",
    "other trackers": "tracker=wandb",
    "multimodal": "multimodal=true",
    "quantised checkpoint": "quantised_checkpoint=true",
    "disk weight sync": "weight_sync=disk",
    "delta weight sync": "weight_sync=delta",
    "asynchronous save": "async_save=true",
}
"""Row -> how a user asks for it under `trainer_options`."""


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
@pytest.mark.parametrize("row", sorted(REFUSED))
def test_what_no_trainer_does_is_refused_by_name(row: str, trainer: str) -> None:
    asked = f"trainer_options.{REFUSED[row]}"
    spec = apply_overrides(recipe(), (f"trainer={trainer}", asked))
    with pytest.raises(UnsupportedError) as refused:
        check_supported(spec)
    message = str(refused.value)
    assert message.startswith(f"{row} (")
    assert REFUSED[row].partition("=")[0] in message
    assert f"trainer {trainer}" in message
    assert refused.value.exit_code == 14
    assert len(refusals(spec)) == 1


def test_every_refusing_row_has_a_test_and_every_option_a_row() -> None:
    nobody = {row.name for row in CAPABILITIES if not row.trainers}
    assert nobody == set(REFUSED) | {"peer numerics on CPU", "FlashInfer attention on CPU"}
    asked_by_rows = set()
    for name, field in TrainerOptions.model_fields.items():
        other = {False: True, 1: 2, "full": "disk", None: 9216, "mlflow": "wandb"}[field.default]
        spec = recipe().model_copy(update={"trainer_options": TrainerOptions(**{name: other})})
        if any(f"trainer_options.{name}=" in str(row.asked(spec)) for row in CAPABILITIES):
            asked_by_rows.add(name)
    assert asked_by_rows == set(TrainerOptions.model_fields)


STOCK = (
    "numerics.policy=stock",
    "plan.gates.logprobs=report",
    "plan.gates.preflight=off",
    "plan.gates.layerwise=off",
    "plan.gates.controls=off",
)


def test_stock_and_peer_numerics_are_for_fsdp2_and_peer_for_cuda_alone() -> None:
    on_cuda, peer = "execution.device=cuda", "numerics.policy=peer"
    for allowed in ((), (on_cuda,), (on_cuda, peer)):
        assert refusals(apply_overrides(recipe(), (*STOCK, *allowed))) == []
    for changes, row in (
        (("trainer=megatron",), "stock numerics ("),
        (("trainer=megatron", on_cuda), "stock numerics on CUDA ("),
        (("trainer=megatron", on_cuda, peer), "peer numerics ("),
        ((peer,), "peer numerics on CPU ("),
    ):
        (refusal,) = refusals(apply_overrides(recipe(), (*STOCK, *changes)))
        assert refusal.startswith(row)


def test_flashinfer_is_an_option_of_aligned_runs_on_cuda() -> None:
    asked = "numerics.rollout_attention=flashinfer"
    assert refusals(apply_overrides(recipe(), (asked, "execution.device=cuda"))) == []
    (refusal,) = refusals(apply_overrides(recipe(), (asked,)))
    assert refusal.startswith("FlashInfer attention on CPU (")
    with pytest.raises(SpecError, match="rollout_attention=flashinfer"):
        apply_overrides(recipe(), (*STOCK, asked, "execution.device=cuda"))
    with pytest.raises(SpecError, match="only the probes can allow"):
        apply_overrides(recipe(), (asked, "plan.gates.preflight=off"))


def test_the_probes_decide_over_another_attention_and_their_figure_is_told() -> None:
    asked = ("numerics.rollout_attention=flashinfer", "execution.device=cuda")
    other, shared = apply_overrides(recipe(), asked), recipe()
    require_allowed(other, Verdict.ALIGNED, "all equal")
    require_allowed(shared, Verdict.MISALIGNED, "a red gate is the flow's to judge")
    for verdict in (Verdict.MISALIGNED, Verdict.VACUOUS):
        with pytest.raises(UnsupportedError, match=r"batch of 8, 3 of 64 tokens, max 0\.25"):
            require_allowed(other, verdict, "worst: batch of 8, 3 of 64 tokens, max 0.25")


def test_all_refusals_come_in_one_error() -> None:
    spec = apply_overrides(
        recipe(), ("trainer_options.critic=true", "trainer_options.tensor_parallel=4")
    )
    with pytest.raises(UnsupportedError, match=r"tensor parallel .*; critic "):
        check_supported(spec)


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_shipped_recipe_runs_on_every_trainer_and_device(
    name: str, device: str, trainer: str
) -> None:
    asked = (f"trainer={trainer}", f"execution.device={device}")
    check_supported(apply_overrides(load_recipe(name), asked))


def test_a_family_without_a_row_is_refused() -> None:
    odd = recipe().model.model_construct(**{**dict(recipe().model), "family": "mamba"})
    with pytest.raises(UnsupportedError, match="mamba is no row of the table"):
        check_supported(recipe().model_copy(update={"model": odd}))


def test_every_family_and_trainer_of_the_spec_is_in_the_table() -> None:
    families = get_args(ModelSpec.model_fields["family"].annotation)
    rows = {row.name for row in CAPABILITIES if row.kind == "family"}
    assert {f"family {name}" for name in families} <= rows
    assert set(get_args(RunSpec.model_fields["trainer"].annotation)) == set(TRAINERS)


def test_a_row_that_one_trainer_lacks_refuses_that_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = tuple(
        replace(row, trainers=("fsdp2",), reason="not there", remedy="use fsdp2")
        if row.name == "stock reduction"
        else row
        for row in CAPABILITIES
    )
    monkeypatch.setattr(registry, "CAPABILITIES", rows)
    stock = ("reduction.kind=stock", "reduction.world_size=1")
    check_supported(apply_overrides(recipe(), stock))
    with pytest.raises(UnsupportedError, match="supported by fsdp2; use fsdp2"):
        check_supported(apply_overrides(recipe(), (*stock, "trainer=megatron")))


def test_unknown_options_and_trainers_are_refused_never_dropped() -> None:
    with pytest.raises(SpecError, match=r"no field 'trainer_options\.tensor_parralel'"):
        apply_overrides(recipe(), ("trainer_options.tensor_parralel=2",))
    # No trainer and no engine has it, so there is not even a row that refuses it.
    with pytest.raises(SpecError, match=r"no field 'trainer_options\.sequence_parallel'"):
        apply_overrides(recipe(), ("trainer_options.sequence_parallel=true",))
    with pytest.raises(SpecError, match="trainer"):
        apply_overrides(recipe(), ("trainer=deepspeed",))


def test_options_decide_no_bit_but_the_trainer_is_identity() -> None:
    plain = trajectory_fingerprint(recipe())
    checkpointing = apply_overrides(recipe(), ("trainer_options.gradient_checkpointing=true",))
    assert trajectory_fingerprint(checkpointing) == plain
    megatron = apply_overrides(recipe(), ("trainer=megatron",))
    assert trajectory_fingerprint(megatron) != plain


def test_a_session_is_refused_before_anything_of_it_exists(tmp_path: Path) -> None:
    spec = apply_overrides(recipe(), ("trainer_options.async_save=true",))
    with (
        pytest.raises(UnsupportedError, match="asynchronous save"),
        leg_session(spec, run_dir=tmp_path, leg="a", fence=Fence(tmp_path, 1)),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_command_refuses_with_code_14_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flows.cli", "run", "tiny_cpu", "--dry-run"]
    asked = ["--set", "trainer_options.critic=true", "--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run(
        [*command, *asked], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 14, done.stderr[-2000:]
    assert "critic (trainer_options.critic=True)" in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
