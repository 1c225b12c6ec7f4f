"""The shared ops on a CUDA device: the same names, signatures and laws as `engines.numerics`.

Callers use `engines.numerics`, which comes here by the device of the tensors; what has no
counterpart there (`add_rms_norm`, `attend_pages`, `mix_experts`, `temper_`, `token_logprobs`,
`digest_sums`) is imported from here, and by vLLM's plugin for CUDA the others too. All kernels are
ours, in Triton.

| what could change a row's bits | what holds it |
| --- | --- |
| number and place of rows | one tile shape, one program a row, no split of a sum |
| dtype and layout of a load | integer sums for normalisers; aligned copies before a sum |
| paging, prefill, chunk, decode | one attention kernel with one tile for all |
| other work on the device | no atomics; parts are added as integers or in one order |

Bits are those of one device class and one version of triton; they are not the CPU's.
"""

from engines.numerics.cuda.attention import (
    attend_pages,
    causal_attention,
    paged_attention,
    paged_attention_batch,
)
from engines.numerics.cuda.digest import WordBlock, digest_sums
from engines.numerics.cuda.embedding import embedding
from engines.numerics.cuda.experts import expert_mlp, mix_experts
from engines.numerics.cuda.linear import (
    linear,
    linear_input_gradient,
    linear_multi,
    linear_weight_gradient,
)
from engines.numerics.cuda.logprobs import (
    chosen_logprobs,
    head_logprobs,
    log_softmax_rows,
    temper_,
    token_logprobs,
)
from engines.numerics.cuda.norm import add_rms_norm, rms_norm
from engines.numerics.cuda.optimizer import adamw_step_, adamw_steps_
from engines.numerics.cuda.pointwise import add, silu_mul
from engines.numerics.cuda.rotary import rotary
from engines.numerics.cuda.router import route
from engines.numerics.cuda.sums import many_row_square_sums, row_square_sums

__all__ = [
    "WordBlock",
    "adamw_step_",
    "adamw_steps_",
    "add",
    "add_rms_norm",
    "attend_pages",
    "causal_attention",
    "chosen_logprobs",
    "digest_sums",
    "embedding",
    "expert_mlp",
    "head_logprobs",
    "linear",
    "linear_input_gradient",
    "linear_multi",
    "linear_weight_gradient",
    "log_softmax_rows",
    "many_row_square_sums",
    "mix_experts",
    "paged_attention",
    "paged_attention_batch",
    "rms_norm",
    "rotary",
    "route",
    "row_square_sums",
    "silu_mul",
    "temper_",
    "token_logprobs",
]
