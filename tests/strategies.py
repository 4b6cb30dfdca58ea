"""Whole calls drawn by hypothesis: sizes, dtypes and options in any combination."""

from hypothesis import strategies as st

from tilewise.conformance.case import Case

side = st.none() | st.integers(0, 40)
POSITIONS = {
    "causal": st.booleans(),
    "window": st.none() | st.integers(1, 60) | st.tuples(side, side),
    "chunk": st.none() | st.integers(1, 40),
    "offset": st.none() | st.integers(-20, 60) | st.just("rows"),
}
SCORES = {
    "softcap": st.none() | st.sampled_from([0.5, 5.0, 50.0]),
    "scale": st.none() | st.sampled_from([1.0, -0.2, 0.01]),
    "alibi": st.sampled_from(["", "h", "bh"]),
    "sinks": st.booleans(),
}
STORED = ["", "f16", "bf16", "int8/32", "int8/128", "int4/32", "int4/64", "fp8_e4m3/64"]


@st.composite
def cases(draw, most=70, forms=("dense", "varlen", "paged"), dtypes=("f32", "f16", "bf16"), head_dims=range(1, 97)):
    """A `Case` with up to `most` queries and keys a sequence."""
    Hkv = draw(st.sampled_from([1, 2, 3]))
    form = draw(st.sampled_from(forms))
    batch = draw(st.integers(1, 4))
    lengths = tuple(draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch)))
    rows = draw(st.integers(1, most))
    fields = {"form": form, "B": batch, "H": Hkv * draw(st.sampled_from([1, 2, 5])), "Hkv": Hkv, "Lq": rows}
    fields |= {name: draw(s) for name, s in (POSITIONS | SCORES).items()}
    fields["D"], fields["Dv"] = draw(st.sampled_from(head_dims)), draw(st.sampled_from(head_dims))
    fields["dtype"] = draw(st.sampled_from(dtypes))
    for name, width in (("k", "D"), ("v", "Dv")):
        fits = [s for s in STORED if not (s.startswith("int4") and fields[width] % 2)]
        fields[name] = draw(st.sampled_from(fits))
    queries = tuple(draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch)))
    if form == "dense":
        keys = fields["Lk"] = draw(st.integers(max(1, *lengths), most + 1))
        fields["lengths"] = lengths if draw(st.booleans()) else ()
        if not (fields["k"] + fields["v"]):
            fields["layout"] = draw(st.sampled_from(["bhld", "blhd"]))
            fields["strides"] = draw(st.sampled_from(["", "sliced", "last"]))
        if fields["lengths"] and fields.get("strides"):
            fields["strides"] = ""
    else:
        keys = max(lengths)
        fields["lengths"] = lengths
        if form == "varlen" or draw(st.booleans()):
            fields["q_lengths"] = queries
        if form == "paged":
            fields["page"] = draw(st.sampled_from([1, 3, 16, 64]))
        elif draw(st.booleans()):
            fields["used"] = tuple(draw(st.integers(0, n)) for n in lengths)
    count = max(queries) if fields.get("q_lengths") else rows
    if min(keys, count) > 1 and draw(st.booleans()):  # a mask of one key or row would read as broadcast
        fields["mask"] = draw(st.sampled_from(["qk", "1k", "hqk", "bhqk", "b11k", "1hq1"]))
        fields["mask_kind"] = draw(st.sampled_from(["bool", "f32", "f16", "bf16"]))
        fields["pattern"] = draw(st.sampled_from(["random", "blocks", "rows", "least"]))
        if draw(st.booleans()):
            fields["tile"] = draw(st.tuples(st.integers(1, 80), st.integers(1, 80)))
    if draw(st.booleans()):
        fields["split_size"] = draw(st.integers(1, 100))
    return Case(**fields)
