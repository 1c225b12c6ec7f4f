"""All faults of the drill: what each does, what has to catch it, and where.

The functions that break things are in `in_driver`, `in_trainer` and `in_rollout`; the page
docs/faults.md is written from this table.
"""

from __future__ import annotations

from engines.drill.fault import Catch, Fault
from model_specs.errors import SpecError
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe
from model_specs.run_spec import RunSpec

OVERRIDES = (
    # A page of the cache is 32 tokens: all prompts share one.
    "data.system_prompt=Answer with the number alone.",
    "sampling.temperature=0.8",
    "loss.kl_coef=0.05",
    "optimizer.weight_decay=0.1",
    "schedule.kind=linear",
    "schedule.horizon_samples=512",
    "plan.keep_tensor_steps=0",
)
"""What `tiny_cpu` needs so that every fault can show."""

FIRST = 3
"""The first step of a course."""
EMBEDDING = "model.embed_tokens.weight"
GATE_PROJ = "model.layers.0.mlp.gate_proj.weight"
UP_PROJ = "model.layers.0.mlp.up_proj.weight"
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"
NEXT_UP_PROJ = "model.layers.1.mlp.up_proj.weight"
KEY_BIAS = "model.layers.0.self_attn.k_proj.bias"


def drill_spec() -> RunSpec:
    """Return the spec that the drill's engines are started with."""
    return apply_overrides(load_recipe("tiny_cpu"), OVERRIDES)


def _diff(probe: str, name: str | None = None, *, says: str = "") -> Catch:
    return Catch(by="diff", step=FIRST, probe=probe, name=name, says=says)


def _gate(name: str | None = None, *, step: int = FIRST, says: str = "") -> Catch:
    return Catch(by="log-prob gate", step=step, name=name, says=says)


def _refusal(says: str, *, error: str = "EngineError") -> Catch:
    return Catch(by="refusal", name=error, says=says)


_SAMPLES = (
    Fault(
        name="token changed",
        place="rollout",
        does="one token of one answer is another than was drawn",
        caught=(_gate("{sample}"), _diff("tokens", "{sample}")),
        in_drill=True,
    ),
    Fault(
        name="samples swapped",
        place="rollout",
        does="two answers to one prompt are exchanged",
        caught=(_diff("tokens", "{sample}"),),
    ),
    Fault(
        name="log-prob one ulp",
        place="rollout",
        does="one log-prob is the next smaller float32",
        caught=(_gate("{sample}"), _diff("rollout_logprobs", "{sample}", says=" 1 ULP")),
    ),
    Fault(
        name="nan log-prob",
        place="rollout",
        does="one log-prob is not a number",
        caught=(_gate("{sample}", says="max nan"), _diff("rollout_logprobs", "{sample}")),
    ),
    Fault(
        name="nan masked",
        place="rollout",
        does="one log-prob was not a number and was made 0 before anybody looked",
        caught=(_gate("{sample}"), _diff("rollout_logprobs", "{sample}")),
    ),
    Fault(
        name="answer lost",
        place="rollout",
        does="the answer to one request does not come back",
        caught=(_refusal("samples came back; missing: "),),
    ),
    Fault(
        name="raw log-probs",
        place="rollout",
        does="log-probs are those before the temperature",
        caught=(_gate(),),
    ),
    Fault(
        name="seed tied to replica",
        place="rollout",
        does="an engine adds its own number to the seed of a request",
        caught=(_diff("tokens", "{sample}"),),
    ),
    Fault(
        name="seed reused",
        place="driver",
        does="all samples of a prompt have one seed",
        caught=(
            _diff("tokens"),
            Catch(by="window", says="no group had rewards that differ"),
        ),
    ),
    Fault(
        name="only truncated responses",
        place="rollout",
        does="every answer is cut off by its length, and cut-off answers are masked",
        caught=(Catch(by="window", says="gradient norm was 0"),),
        overrides=("loss.mask_truncated=true",),
    ),
)

_WEIGHTS = (
    Fault(
        name="stale weights",
        place="rollout",
        does="a push reaches the engine and is not copied",
        caught=(Catch(by="sent = received", step=FIRST, name=EMBEDDING), _gate(step=FIRST + 1)),
        steps=2,
        in_drill=True,
    ),
    Fault(
        name="stale weights behind echoed digests",
        place="rollout",
        does="the same, and the engine answers with the digests of what arrived",
        caught=(_gate(step=FIRST + 1),),
        steps=2,
    ),
    Fault(
        name="prefix cache not reset",
        place="rollout",
        does="prefixes computed with old weights stay in the cache after a push",
        caught=(_gate(step=FIRST + 1),),
        steps=2,
        in_drill=True,
    ),
    Fault(
        name="one tensor not pushed",
        place="trainer",
        does="the sender leaves one tensor out",
        caught=(_refusal(f"missing: {DOWN_PROJ}"),),
    ),
    Fault(
        name="one tensor not loaded",
        place="rollout",
        does="the engine's loader skips one tensor and says that it took it",
        caught=(Catch(by="sent = received", step=FIRST, name=NEXT_UP_PROJ),),
        in_drill=True,
    ),
    Fault(
        name="weights pushed twice",
        place="rollout",
        does="every bucket is delivered twice in one push",
        caught=(_refusal("so one is there twice or missing"),),
    ),
    Fault(
        name="sent before the update was applied",
        place="trainer",
        does="the embedding that is sent is that of the step before",
        caught=(_diff("sent", EMBEDDING), _gate(step=FIRST + 1)),
        steps=2,
    ),
    Fault(
        name="one tensor in another dtype",
        place="trainer",
        does="one tensor is sent as float32",
        caught=(_refusal(f"{DOWN_PROJ} float32"),),
    ),
    Fault(
        name="tied head untied",
        place="rollout",
        does="the output head is a copy of the embedding instead of the embedding",
        caught=(_gate(step=FIRST + 1),),
        steps=2,
    ),
    Fault(
        name="qkv bias order",
        place="rollout",
        does="the biases of keys and values are exchanged in the fused bias",
        caught=(Catch(by="sent = received", step=FIRST - 1, name=KEY_BIAS), _gate()),
    ),
)

_ARITHMETIC = (
    Fault(
        name="rope theta",
        place="rollout",
        does="rotary frequencies are of another base",
        caught=(Catch(by="layer-wise gate", name="layer 0"), _gate()),
    ),
    Fault(
        name="kernel chosen by batch size",
        place="rollout",
        does="few rows are multiplied in two parts, as a split-K kernel does, many in one",
        caught=(Catch(by="preflight", says="probes differ from the requests alone"), _gate()),
    ),
    Fault(
        name="op outside of the shared ones",
        place="rollout",
        does="matrix products are torch's own",
        caught=(Catch(by="preflight", name="EngineError", says="vLLM's forward runs aten."),),
    ),
    Fault(
        name="one layer off by an ulp",
        place="rollout",
        does="channel 0 of the second layer's output is the next bfloat16",
        caught=(Catch(by="layer-wise gate", name="layer 1", says="channel 0"),),
        in_drill=True,
    ),
    Fault(
        name="temperature ignored in the re-score",
        place="trainer",
        does="the trainer scores at temperature 1",
        caught=(_gate(),),
    ),
    Fault(
        name="forward differs with gradients",
        place="trainer",
        does="the training forward is an ULP off the score of the same weights",
        caught=(_refusal("the training forward differs from the score"),),
    ),
    Fault(
        name="gate given the rollout's own log-probs",
        place="driver",
        does="the rollout is wrong by an ULP and the gate compares it with itself",
        caught=(_refusal("was committed as"),),
        in_drill=True,
    ),
)

_TRAINING = (
    Fault(
        name="old reference model",
        place="trainer",
        does="the reference is the resumed checkpoint instead of the run's first weights",
        caught=(_diff("loss", "{sample}"),),
    ),
    Fault(
        name="gradient scale",
        place="trainer",
        does="the loss of every slot counts twice",
        caught=(_diff("grads", EMBEDDING),),
        in_drill=True,
    ),
    Fault(
        name="slot dropped",
        place="trainer",
        does="the gradient of the last slot is not added",
        caught=(_refusal("a complete tree needs a power of two"),),
    ),
    Fault(
        name="slot doubled",
        place="trainer",
        does="the gradient of the last slot is added twice",
        caught=(_refusal("a complete tree needs a power of two"),),
    ),
    Fault(
        name="slot taken for another",
        place="trainer",
        does="the first slot is added twice and the second not at all",
        caught=(_diff("grads", EMBEDDING),),
    ),
    Fault(
        name="reduction order",
        place="trainer",
        does="slots are added from left to right instead of as a balanced tree",
        caught=(_diff("grads"),),
    ),
    Fault(
        name="gradient not finite",
        place="trainer",
        does="one element of a gradient is not a number",
        caught=(_refusal(f"the gradient of {DOWN_PROJ} is not finite"),),
    ),
    Fault(
        name="generator touched",
        place="trainer",
        does="something draws from torch's own generator while gradients are taken",
        caught=(_refusal("the random generator of torch was touched"),),
    ),
    Fault(
        name="schedule resumed twice",
        place="trainer",
        does="the samples of an update are counted twice, so the learning rate is another",
        caught=(_diff("weights", EMBEDDING),),
    ),
    Fault(
        name="optimizer step shared",
        place="trainer",
        does="the optimizer's count of steps is advanced by somebody else too",
        caught=(_diff("optimizer", "step"),),
    ),
    Fault(
        name="moments of another parameter",
        place="trainer",
        does="the first moments of two matrices of one shape are exchanged",
        caught=(_diff("optimizer", f"exp_avg.{GATE_PROJ}"),),
        in_drill=True,
    ),
    Fault(
        name="dtype of one parameter",
        place="trainer",
        does="one master is held in bfloat16",
        caught=(_diff("weights", UP_PROJ),),
    ),
)

_DRIVER = (
    Fault(
        name="data cursor off by one",
        place="driver",
        does="a step draws the prompts of the next one",
        caught=(_diff("prompts"),),
    ),
    Fault(
        name="other root seed",
        place="driver",
        does="the resumed leg has another root seed",
        caught=(Catch(by="identity", name="seeds.root"),),
    ),
    Fault(
        name="completion-order batch",
        place="driver",
        does="samples are taken in the order in which they ended",
        caught=(_diff("advantages"),),
    ),
    Fault(
        name="reward of the wrong sample",
        place="driver",
        does="the rewards of two samples are exchanged",
        caught=(_diff("rewards", "{sample}"),),
    ),
    Fault(
        name="reward that remembers",
        place="driver",
        does="a reward depends on the calls before it",
        caught=(_refusal("came out differently when computed again", error="DivergedError"),),
    ),
    Fault(
        name="equal rewards",
        place="driver",
        does="all rewards are equal",
        caught=(
            _diff("rewards", "{sample}"),
            Catch(by="window", says="no group had rewards that differ"),
        ),
    ),
    Fault(
        name="advantage of the wrong group",
        place="driver",
        does="the advantages of each group go to the group before it",
        caught=(_diff("advantages", "{sample}"),),
        in_drill=True,
    ),
    Fault(
        name="group of one",
        place="driver",
        does="every sample is compared with itself alone",
        caught=(
            _diff("advantages"),
            Catch(by="window", says="no group had rewards that differ"),
        ),
    ),
    Fault(
        name="other tokenizer",
        place="rollout",
        does="two characters of the vocabulary are exchanged",
        caught=(_diff("prompts"),),
    ),
    Fault(
        name="other template",
        place="rollout",
        does="the chat template has another word",
        caught=(_diff("prompts"),),
    ),
)

_EVIDENCE = (
    Fault(
        name="checkpoint of the previous step",
        place="driver",
        does="the place of the checkpoint holds that of the step before",
        caught=(_refusal("was asked for", error="CheckpointError"),),
    ),
    Fault(
        name="torn file",
        place="driver",
        does="the checkpoint's largest file lost its end",
        caught=(_refusal("damaged", error="CheckpointError"),),
        in_drill=True,
    ),
    Fault(
        name="bit rot in a checkpoint",
        place="driver",
        does="one bit in the middle of the checkpoint's largest file is another",
        caught=(_refusal("damaged", error="CheckpointError"),),
    ),
    Fault(
        name="checkpoint without its last file",
        place="driver",
        does="writing of the checkpoint was never finished",
        caught=(_refusal("is not a complete checkpoint", error="CheckpointError"),),
    ),
    Fault(
        name="checkpoint of another run",
        place="driver",
        does="the checkpoint is of another trajectory",
        caught=(_refusal("belongs to trajectory", error="CheckpointError"),),
    ),
    Fault(
        name="newer attempt has started",
        place="driver",
        does="the run is opened again elsewhere in the middle of a step",
        caught=(_refusal("may not write any more", error="StaleAttemptError"),),
    ),
    Fault(
        name="infinity clamped by a store",
        place="driver",
        does="a log-prob is -inf and the store of sample values clamps it",
        caught=(
            _gate("{sample}", says="max inf"),
            Catch(by="verify", name="ArtifactError", says="rollout_logprobs of {sample}"),
        ),
    ),
    Fault(
        name="ledger edited afterwards",
        place="driver",
        does="one root of the last line is replaced",
        caught=(Catch(by="verify", name="ArtifactError", says="root of grads"),),
    ),
    Fault(
        name="flag set in the wrong process",
        place="rollout",
        does="the variable that asks for the shared ops is not in the engine's process",
        caught=(Catch(by="start", name="EngineError", says="LOCKSTEP_NUMERICS is None"),),
    ),
    Fault(
        name="variable overwritten",
        place="rollout",
        does="the engine's number of threads is another than it was started with",
        caught=(
            _refusal("rollout.rollout-0.variables.OMP_NUM_THREADS was '1'"),
            Catch(by="environment", name="rollout.rollout-0.variables.OMP_NUM_THREADS"),
        ),
    ),
    Fault(
        name="switch flipped",
        place="trainer",
        does="torch's deterministic mode was switched off after the start",
        caught=(
            _refusal("trainer.torch.deterministic_algorithms was True"),
            Catch(by="environment", name="trainer.torch.deterministic_algorithms"),
        ),
    ),
)

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for part in (_SAMPLES, _WEIGHTS, _ARITHMETIC, _TRAINING, _DRIVER, _EVIDENCE)
    for fault in part
}
"""Name -> fault, in causal order."""

DRILL = tuple(name for name, fault in FAULTS.items() if fault.in_drill)
"""The faults that `lockstep drill` runs unless told otherwise."""


def chosen_faults(names: tuple[str, ...]) -> tuple[Fault, ...]:
    """Return the faults of these names, in causal order.

    Raises:
        SpecError: There is none of a name.
    """
    unknown = sorted(set(names) - set(FAULTS))
    if unknown:
        raise SpecError(f"no fault {unknown[0]!r}; there are: {', '.join(FAULTS)}")
    return tuple(fault for name, fault in FAULTS.items() if name in names)
