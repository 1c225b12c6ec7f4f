"""The control of the gates: in an engine's process, one of vLLM's own ops back under the shared.

handle.run("tools.gpu.native_op:leave_native", "RotaryEmbedding")   # before the engine is made
"""

from __future__ import annotations


def leave_native(name: str) -> list[str]:
    """Install the shared ops in this process and take the one for vLLM's class `name` out again."""
    from vllm.model_executor.custom_op import op_registry_oot

    from engines.rollout import plugin

    plugin.register()
    del op_registry_oot[name]
    return sorted(op_registry_oot)
