"""Few tokens by a matrix whose memory goes row after row, or column after column.

The matrices are those of the GPT-2 of models.py, and its table of tokens as the logits take
it. Of each there are as many copies as come to 256 MB, more than a processor keeps near, so
that they come from memory as in a step of writing. Median milliseconds a product, in turn.

    python benchmarks/matrix_order.py    writes results/matrix_order.json
"""

import argparse
import statistics

import torch
from paired import time_in_turn, write_record
from torch import Tensor

SHAPES = ((512, 512), (512, 2048), (2048, 512), (512, 50257))
TOKENS = (1, 8)
BYTES = 256e6


def multiply(x: Tensor, matrices: list[Tensor]) -> None:
    """x by one matrix after the other."""
    for matrix in matrices:
        x @ matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            count = max(1, round(BYTES / (shape[0] * shape[1] * dtype.itemsize)))
            by_rows = [torch.randn(shape).to(dtype) for _ in range(count)]
            by_columns = [matrix.T.contiguous().T for matrix in by_rows]
            for tokens in TOKENS:
                x = torch.randn(tokens, shape[0]).to(dtype)
                calls = {
                    "rows_ms": lambda x=x, many=by_rows: multiply(x, many),
                    "columns_ms": lambda x=x, many=by_columns: multiply(x, many),
                }
                with torch.inference_mode():
                    times = time_in_turn(calls, rounds)
                row = {"dtype": str(dtype)[6:], "shape": shape, "tokens": tokens}
                for name, ms in times.items():
                    row[name] = round(statistics.median(ms) / count, 4)
                rows.append(row)
                print(row, flush=True)
    write_record("matrix_order", {"rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
