"""The micro-kernels for a CPU that is not here: compiled for AArch64 with NEON, they stay in vector registers.

A process of its own takes vectors of four floats, as there, emits each micro-kernel into a plain LLVM module, and
compiles it for a Neoverse core. What comes out is read: a product is `fmla` over four lanes, narrow types are widened
by vector instructions, and nothing calls a library, which is what LLVM does where a target lacks an operation.
"""

import json
import os
import re
import subprocess
import sys

import pytest

CODE = r"""
import json, sys
import llvmlite.binding as llvm
from llvmlite import ir
from tilewise.backends.cpu.gemm import fp32, gemv_fp32, gemv_sdot
from tilewise.backends.cpu.codegen import formats, load_store, vector
from tilewise.backends.cpu.mainloop import score_mod, softmax

assert vector.W == 4, vector.W
KERNELS = {
    "gemm_keys_all": (fp32.gemm_keys_all, "iiiii"), "gemm_values_3": (fp32.gemm_values_3, "iiiiii"),
    "pack_3": (fp32.pack_3, "iiii"), "transpose": (load_store.transpose, "iiii"),
    "online_softmax_columns": (softmax.online_softmax_columns, "iiiiiiff"),
    "softcap_cells": (score_mod.softcap_cells, "iiiff"),
    "exp_row": (softmax.exp_row, "iiff"), "store_f16": (load_store.store_f16, "iiif"),
    "store_bf16": (load_store.store_bf16, "iiif"),
}
for kind in formats.DECODE:
    KERNELS[f"qk {kind}"] = gemv_fp32.make_qk(kind, 4, 4), "i" * 11
    KERNELS[f"pv {kind}"] = gemv_fp32.make_pv(kind, 4, 4), "i" * 11
for kind in gemv_sdot.PARTS:
    KERNELS[f"sdot_qk {kind}"] = gemv_sdot.make_qk(kind), "i" * 12
    KERNELS[f"sdot_pv {kind}"] = gemv_sdot.make_pv(kind, 2), "i" * 11


class Context:
    def get_dummy_value(self):
        return None


llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
machine = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(cpu="neoverse-n1", opt=3)
kinds = {"i": ir.IntType(64), "f": ir.FloatType()}
found = {}
for name, (kernel, signature) in KERNELS.items():
    module = ir.Module(name)
    module.triple = machine.triple
    types = [kinds[letter] for letter in signature]
    _, emit = kernel._defn(None, *[None] * len(signature))
    probe = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), types), "probe")  # what it gives back, if anything
    given = emit(Context(), ir.IRBuilder(probe.append_basic_block()), None, probe.args)
    function = ir.Function(module, ir.FunctionType(given.type if given is not None else ir.VoidType(), types), "kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    value = emit(Context(), builder, None, function.args)
    builder.ret_void() if value is None else builder.ret(value)
    parsed = llvm.parse_assembly(str(module))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder_ = llvm.create_pass_builder(machine, options)
    builder_.getModulePassManager().run(parsed, builder_)
    found[name] = machine.emit_assembly(parsed)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def assembly():
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+fma,+f16c"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nothing_is_called(assembly):
    called = {name: re.findall(r"^\s+bl\s+(\S+)", text, re.MULTILINE) for name, text in assembly.items()}
    assert not {name: calls for name, calls in called.items() if calls}


@pytest.mark.parametrize(
    "name", ["gemm_keys_all", "gemm_values_3", "online_softmax_columns", "qk f16", "pv int4", "qk int8"]
)
def test_products_are_of_four_lanes(assembly, name):
    assert re.search(r"\bfmla\s+v\d+\.4s", assembly[name])
    assert not re.search(r"\bfmadd\s+s\d+", assembly[name])


@pytest.mark.parametrize(
    ("name", "instruction"),
    [("qk f16", "fcvtl"), ("qk bf16", "shll|ushll"), ("qk int8", "scvtf"), ("qk int4", "scvtf"),
     ("qk fp8_e4m3", "fcvtl"), ("store_f16", "fcvtn"), ("transpose", r"zip1|trn1|mov\s+v")],
)  # fmt: skip
def test_narrow_types_are_widened_by_vectors(assembly, name, instruction):
    assert re.search(rf"\b({instruction})", assembly[name])


@pytest.mark.parametrize("name", ["sdot_qk int8", "sdot_pv int8", "sdot_qk int4", "sdot_pv int4"])
def test_integer_caches_by_sdot_in_registers(assembly, name):
    """No element is widened, and all sums stay in registers: loops with products store nothing."""
    loops = [part for part in re.split(r"^\.LBB\S+:", assembly[name], flags=re.MULTILINE) if "sdot" in part]
    assert sum(part.count("sdot") for part in loops) >= 24
    for part in loops:
        products = part[: part.rindex("sdot")]
        assert not re.search(r"^\s+st[rp]\s", products, re.MULTILINE)
        assert not re.search(r"\b(sxtl|sshll)", products)


def test_a_block_of_products_stays_in_registers(assembly):
    """24 sums, four vectors of q and one number of K at a time: the inner loop stores nothing."""
    loops = [part for part in re.split(r"^\.LBB\S+:", assembly["gemm_keys_all"], flags=re.MULTILINE) if "fmla" in part]
    inner = max(loops, key=lambda part: part.count("fmla"))
    assert inner.count("fmla") >= 24
    assert not re.search(r"^\s+st[rp]\s", inner, re.MULTILINE)
