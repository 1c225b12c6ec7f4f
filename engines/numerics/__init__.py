"""One op, one definition: what the trainer and vLLM's model classes both compute with.

The table is the CPU's; on CUDA tensors the ops of `engines.numerics.cuda` run, under the same names
and laws (`engines.numerics.dispatch`).

Every op is a function of values alone. What it returns for a row depends on that row and the
weights: not on how many rows there are or where this one stands, nor on other output columns,
storage offset or stride, the number of threads, or whether gradients are on. Backward is explicit,
and what is summed over rows has one written order. Inputs are row-major `[rows, features]`, float32
or bfloat16.

| file | op | definition | order of the gradient |
| --- | --- | --- | --- |
| linear | `linear`, `linear_multi` | GEMM on rows padded to 16 | dW: blocks of 64 rows |
| norm | `rms_norm` | float32, rounded, times weight | dw: tree in blocks of 64 rows |
| pointwise | `add` | one rounding | |
| pointwise | `silu_mul` | `round(x / (1 + exp(-x))) * up` | |
| rotary | `rotary` | two halves; cos, sin rounded first | |
| attention | `causal_attention` | online softmax, blocks of 64 keys | query tiles, last to first |
| attention | `paged_attention`, `..._batch` | the same, from a cache | none |
| router | `route` | softmax, top-k, ties to the lowest expert | |
| experts | `expert_mlp` | combined in slot order | dW: blocks of 64 source rows |
| embedding | `embedding` | look-up | dW: blocks of 64 rows |
| logprobs | `log_softmax_rows` | torch's, float32, contiguous | none |
| logprobs | `chosen_logprobs` | of `float32(logits) / temperature` | |
| logprobs | `head_logprobs` | the same on `linear`; and entropy | dW: blocks of 64 rows |
| logprobs | `forbid_` | ids without probability in some rows | 0 |
| sums | `token_sum`, `ordered_sum` | exactly rounded: of no order | |
| sums | `row_square_sums`, `many_...` | float64, halved to one | none |
| sums | `tree_sum` | balanced binary tree | none |
| optimizer | `adamw_step_`, `adamw_steps_` | each operation rounds by itself | none |

Weight gradients need sequences that start at multiples of 64 rows, with zero rows between them:
then a packed slot's gradient is the left-to-right sum over its sequences, whatever is packed
together. A slot that is run in several parts keeps that one sum (`SlotSums`).

    hidden = embedding(ids, weight)
    q, k, v = linear_multi(rms_norm(hidden, norm, 1e-5), (wq, wk, wv), (None, None, None))
"""

from engines.environment import cap_cpu_isa
from engines.numerics.attention import causal_attention, paged_attention, paged_attention_batch
from engines.numerics.blocks import ROW_BLOCK, ROW_TILE
from engines.numerics.dispatch import by_device
from engines.numerics.embedding import embedding
from engines.numerics.experts import expert_mlp
from engines.numerics.linear import (
    linear,
    linear_input_gradient,
    linear_multi,
    linear_weight_gradient,
)
from engines.numerics.logprobs import (
    Forbidden,
    chosen_logprobs,
    forbid_,
    head_logprobs,
    log_softmax_rows,
)
from engines.numerics.norm import rms_norm
from engines.numerics.optimizer import adamw_step_, adamw_steps_
from engines.numerics.pointwise import add, silu_mul
from engines.numerics.rotary import rotary, rotary_inv_freq
from engines.numerics.router import route
from engines.numerics.slot_sums import SlotSums
from engines.numerics.sums import (
    many_row_square_sums,
    ordered_sum,
    row_square_sums,
    token_sum,
    tree_sum,
)

cap_cpu_isa()

adamw_step_ = by_device(adamw_step_)
adamw_steps_ = by_device(adamw_steps_)
add = by_device(add)
causal_attention = by_device(causal_attention)
chosen_logprobs = by_device(chosen_logprobs)
embedding = by_device(embedding)
expert_mlp = by_device(expert_mlp)
head_logprobs = by_device(head_logprobs)
linear = by_device(linear)
linear_input_gradient = by_device(linear_input_gradient)
linear_multi = by_device(linear_multi)
linear_weight_gradient = by_device(linear_weight_gradient)
log_softmax_rows = by_device(log_softmax_rows)
many_row_square_sums = by_device(many_row_square_sums)
paged_attention = by_device(paged_attention)
paged_attention_batch = by_device(paged_attention_batch)
rms_norm = by_device(rms_norm)
rotary = by_device(rotary)
route = by_device(route)
row_square_sums = by_device(row_square_sums)
silu_mul = by_device(silu_mul)

__all__ = [
    "ROW_BLOCK",
    "ROW_TILE",
    "Forbidden",
    "SlotSums",
    "adamw_step_",
    "adamw_steps_",
    "add",
    "causal_attention",
    "chosen_logprobs",
    "embedding",
    "expert_mlp",
    "forbid_",
    "head_logprobs",
    "linear",
    "linear_input_gradient",
    "linear_multi",
    "linear_weight_gradient",
    "log_softmax_rows",
    "many_row_square_sums",
    "ordered_sum",
    "paged_attention",
    "paged_attention_batch",
    "rms_norm",
    "rotary",
    "rotary_inv_freq",
    "route",
    "row_square_sums",
    "silu_mul",
    "token_sum",
    "tree_sum",
]
