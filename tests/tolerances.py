"""The one table of tolerances: absolute error allowed against a float64 truth, by dtype of the inputs.

Values are for outputs of order one. float32 runs at highest matmul precision everywhere; bfloat16 and float16 carry
8 and 11 bits of mantissa, so a sum of order one is off by 2**-8 and 2**-11 before anything is wrong.
"""

OP_ATOL = {"float32": 2e-4, "bfloat16": 5e-2, "float16": 1e-2}
SPLIT_ATOL = 1e-5  # float32, one call against any split of it, logits and states
