"""Names of torch's functions and methods that differ from those in the tables of `lowering.py`."""

# Names that differ from those in `LOWER`
SAME_AS = {
    "absolute": "abs",
    "clip": "clamp",
    "div": "true_divide",
    "divide": "true_divide",
    "expit": "sigmoid",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "matrix_transpose": "mT",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "type_as": "to",
}
DUNDER = {
    "__and__": "bitwise_and",
    "__floordiv__": "floor_divide",
    "__invert__": "bitwise_not",
    "__mod__": "remainder",
    "__or__": "bitwise_or",
    "__radd__": "add",
    "__rand__": "bitwise_and",
    "__rmul__": "mul",
    "__ror__": "bitwise_or",
    "__rxor__": "bitwise_xor",
    "__truediv__": "true_divide",
    "__xor__": "bitwise_xor",
}

IN_PLACE = {
    "iadd": "add",
    "iand": "bitwise_and",
    "ifloordiv": "floor_divide",
    "ilshift": "lshift",
    "imod": "remainder",
    "imul": "mul",
    "ior": "bitwise_or",
    "ipow": "pow",
    "irshift": "rshift",
    "isub": "sub",
    "itruediv": "true_divide",
    "ixor": "bitwise_xor",
}
