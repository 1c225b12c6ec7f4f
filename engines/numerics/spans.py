"""Which rows of a batch belong to packed sequences; one rule for every device."""

from __future__ import annotations

from collections.abc import Sequence


def check_spans(starts: Sequence[int], lengths: Sequence[int], *, num_rows: int) -> None:
    """Require that sequences lie in the rows of a batch, one after the other.

    Args:
        starts: first row of each sequence.
        lengths: rows of each sequence; where it is 0 the start does not count.
        num_rows: rows of the batch; there may be rows of no sequence anywhere.

    Raises:
        ValueError: A sequence leaves the batch, begins before the last one's end, or has fewer
            than 0 rows.
    """
    end = 0
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length < 0 or (length and not end <= start <= num_rows - length):
            raise ValueError(
                f"causal_attention: sequence {index} has {length} rows from row {start}, of "
                f"{num_rows} rows of which the first {end} are taken; pack sequences in order, "
                "without overlap"
            )
        end = start + length if length else end
