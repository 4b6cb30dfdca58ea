"""ONNX Runtime on a CPU: its operators GroupQueryAttention (causal, over a cache) and MultiHeadAttention."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ....core.options import as_window
from ...workloads import Inputs, Workload
from .candidate import Candidate, Refused, not_installed, refuse

NAME = "ONNX Runtime"


def missing() -> str | None:
    return not_installed("onnxruntime") or not_installed("onnx")


def candidates(case: Workload, x: Inputs) -> Iterator[Candidate]:
    refuse(NAME, GPU_here=x.q.device.type != "cpu", page_tables=case.page_size, packed_sequences=case.packed)
    refuse(NAME, masks_here=case.mask, lengths_here=case.lengths, chunks=case.chunk, ALiBi=case.alibi, sinks=case.sinks)
    refuse(NAME, other_dtypes_here=x.q.dtype != torch.float32, other_value_dim=case.value_dim or case.latent)
    if case.causal:
        yield _cached(case, x)
    if case.heads == case.kv_heads and case.window is None and case.softcap is None:
        square = not case.causal or case.q_len == case.kv_len
        yield _whole(case, x) if square else Candidate(f"{NAME} MHA", refusal="its causal mask is square")
    elif not case.causal:
        raise Refused(NAME, "it has no groups, window or softcap without causal")


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[B, H, L, D]` as `[B, L, H * D]`."""
    return x.transpose(1, 2).flatten(2).contiguous()


def _cached(case: Workload, x: Inputs) -> Candidate:
    """A cache of past keys that the new ones are written to in place."""
    attributes = {"num_heads": case.heads, "kv_num_heads": case.kv_heads, "softcap": float(case.softcap or 0)}
    attributes["scale"] = case.head_dim**-0.5 if case.scale is None else case.scale
    if case.window is not None:
        left, right = as_window(case.window)
        if left is None or right not in (None, 0):
            raise Refused(f"{NAME} GQA", "its windows are causal")
        attributes["local_window_size"] = left + 1
    new = case.kv_len - case.q_len
    out = torch.empty(case.batch, case.q_len, case.heads * case.head_dim)
    k, v = x.k.contiguous().clone(), x.v.contiguous().clone()
    inputs = {"query": _rows(x.q), "key": _rows(x.k[:, :, new:]), "value": _rows(x.v[:, :, new:]), "past_key": k}
    inputs |= {"past_value": v, "seqlens_k": torch.full((case.batch,), case.kv_len - 1, dtype=torch.int32)}
    inputs["total_sequence_length"] = torch.tensor([case.kv_len], dtype=torch.int32)
    outputs = {"output": out, "present_key": k, "present_value": v}
    return _candidate(f"{NAME} GQA", "GroupQueryAttention", attributes, inputs, outputs, case)


def _whole(case: Workload, x: Inputs) -> Candidate:
    attributes = {"num_heads": case.heads, "unidirectional": int(case.causal and case.q_len > 1)}
    attributes["scale"] = case.head_dim**-0.5 if case.scale is None else case.scale  # type: ignore[assignment]
    inputs = {"query": _rows(x.q), "key": _rows(x.k), "value": _rows(x.v)}
    outputs = {"output": torch.empty(case.batch, case.q_len, case.heads * case.head_dim)}
    return _candidate(f"{NAME} MHA", "MultiHeadAttention", attributes, inputs, outputs, case)


def _candidate(
    name: str,
    operator: str,
    attributes: dict[str, Any],
    inputs: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
    case: Workload,
) -> Candidate:
    """One operator as a model, bound to these tensors."""
    onnx, runtime = (importlib.import_module(module) for module in ("onnx", "onnxruntime"))
    helper = onnx.helper

    def values(tensors: dict[str, torch.Tensor]) -> Sequence[Any]:
        kinds = {torch.float32: onnx.TensorProto.FLOAT, torch.int32: onnx.TensorProto.INT32}
        return [helper.make_tensor_value_info(n, kinds[y.dtype], list(y.shape)) for n, y in tensors.items()]

    node = helper.make_node(operator, list(inputs), list(outputs), domain="com.microsoft", **attributes)
    graph = helper.make_graph([node], "attention", values(inputs), values(outputs))
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=8)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")  # its spinning threads would slow others
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for word, y in tensors.items():
            bind(word, "cpu", 0, y.numpy().dtype.type, list(y.shape), y.data_ptr())

    def run() -> torch.Tensor:
        session.run_with_iobinding(binding)
        assert inputs  # keeps the bound memory alive
        return outputs["output"].unflatten(2, (case.heads, case.head_dim)).transpose(1, 2)

    return Candidate(name, run)
