"""How many outcomes the gradient of one step has in 50 repeats, while another stream keeps busy.

    python3 -m tools.gpu.backward_repeats [OUT.json] [--recipe gsm8k_qwen2_5_0_5b] [--samples 16]

The trainer of the product in this process, random weights and samples of the recipe's shape. An
outcome is the root digest of all gradients. The control: the same samples with one token changed.
Exit code 1 where there is more than one outcome, or the control has the same one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.train.group import trainer_env
from model_specs.overrides import apply_overrides
from model_specs.registry import load_recipe


def main() -> int:
    """Run, print, write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--recipe", default="gsm8k_qwen2_5_0_5b")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--scratch", default=str(Path(tempfile.gettempdir()) / "float64-replay"))
    options = parser.parse_args()
    spec = apply_overrides(
        load_recipe(options.recipe),
        (
            f"execution.device={options.device}", "loss.reference=false", "reduction.slots=2",
            "sampling.max_new_tokens=64", *options.set,
        ),
    )  # fmt: skip
    os.environ.update(trainer_env(spec))
    report = repeat(spec, options.samples, options.repeats, Path(options.scratch))
    print(json.dumps(report, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1))
    return 0 if report["outcomes"] == 1 and report["control_differs"] else 1


def repeat(spec: Any, count: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Return the number of outcomes and the figures beside it."""
    import torch

    from engines.provenance.digest import root_digest
    from engines.train.shards import merged_digests
    from tools.gpu.local_trainer import samples, started

    chosen = samples(spec, count)
    with started(spec, folder) as trainer:

        def outcome(of: list[Any]) -> str:
            gradients, _ = trainer._gradients(of)
            return root_digest(merged_digests(gradients))

        trainer.score(chosen)
        first = outcome(chosen)
        began = time.perf_counter()
        outcomes = {first}
        for _ in range(repeats):
            load()
            outcomes.add(outcome(chosen))
        seconds = time.perf_counter() - began
        tokens = chosen[0].token_ids
        other = [replace(chosen[0], token_ids=(tokens[0] ^ 1, *tokens[1:])), *chosen[1:]]
        trainer.score(other)
        differs = outcome(other) != first
    return {
        "recipe": spec.recipe,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "samples": count,
        "repeats": repeats,
        "outcomes": len(outcomes),
        "root": first,
        "control_differs": differs,
        "seconds_each": round(seconds / repeats, 3),
    }


def load() -> None:
    """Give a second stream products that take about as long as a backward."""
    import torch

    if not torch.cuda.is_available():
        return
    if not hasattr(load, "stream"):
        load.stream = torch.cuda.Stream()
        load.busy = torch.randn(8192, 8192, device="cuda").bfloat16()
    with torch.cuda.stream(load.stream):
        for _ in range(100):
            load.busy = (load.busy @ load.busy).mul_(1e-3)


if __name__ == "__main__":
    sys.exit(main())
