"""One other library in a process of its own. Run as a script: it imports nothing of npattn.

It reads pickled requests from standard input and answers each on standard output: ("prepare", kind, arrays,
options) with the result, ("run", repeats) with the seconds of one call, an exception with its text.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Call = Callable[[], Any]
Prepared = tuple[Call, Callable[[Any], Array]]  # the call, and from what it returns to an array
# Makes a call from ("attention" | "matmul" | "softmax", arrays, options).
Library = Callable[[str, tuple[Array, ...], dict[str, Any]], Prepared]


def use_torch(threads: int) -> tuple[str, Library]:
    torch: Any = import_module("torch")

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)

    attention = torch.nn.functional.scaled_dot_product_attention

    def layer(heads: int, x: Any, *weights: Any) -> Any:
        query, key, value = ((x @ w).reshape(len(x), heads, -1).swapaxes(0, 1) for w in weights[:3])
        return attention(query, key, value).swapaxes(0, 1).reshape(len(x), -1) @ weights[3]

    def make(kind: str, arrays: tuple[Array, ...], options: dict[str, Any]) -> Prepared:
        def tensor(array: Array) -> Any:
            if array.dtype.name == "bfloat16":  # torch has its own
                return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(array)

        def finish(result: Any) -> Array:
            array: Array = (result.float() if result.dtype == torch.bfloat16 else result).numpy()
            return array.reshape(arrays[0].shape) if kind == "attention" else array

        tensors = [tensor(array) for array in arrays]
        if kind == "matmul":
            return lambda: torch.matmul(*tensors), finish
        if kind in ("softmax", "log_softmax"):
            return partial(getattr(torch, kind), tensors[0], -1), finish
        if kind == "layer":
            return lambda: layer(options["heads"], *tensors), finish
        visible = options["visible"]
        mask = None if visible is None else torch.from_numpy(visible)
        (batch, heads, length, width), kv_heads = arrays[0].shape, arrays[1].shape[1]
        if length == 1:  # the heads of a group as rows of one head: far faster than enable_gqa
            tensors[0] = tensors[0].reshape(batch, kv_heads, heads // kv_heads, width)
        grouped = tensors[0].shape[1] != kv_heads

        def call() -> Any:
            return attention(*tensors, attn_mask=mask, is_causal=options["causal"], enable_gqa=grouped)

        return call, finish

    return str(torch.__version__), make


def use_jax(threads: int) -> tuple[str, Library]:
    jax: Any = import_module("jax")

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)  # else float64 arrays become float32

    def make(kind: str, arrays: tuple[Array, ...], options: dict[str, Any]) -> Prepared:
        if kind == "attention":
            arrays = tuple(np.ascontiguousarray(array.swapaxes(1, 2)) for array in arrays)
            visible = options["visible"]
            mask = None if visible is None else jax.numpy.asarray(visible)[None, None]

            def function(query: Any, key: Any, value: Any) -> Any:
                attention = jax.nn.dot_product_attention
                return attention(query, key, value, mask=mask, is_causal=options["causal"])
        else:
            function = jax.numpy.matmul if kind == "matmul" else jax.nn.softmax
        placed = [jax.device_put(array) for array in arrays]
        compiled = jax.jit(function)

        def finish(result: Any) -> Array:
            array = np.asarray(result)
            return array.swapaxes(1, 2) if kind == "attention" else array

        return lambda: compiled(*placed).block_until_ready(), finish

    return jax.__version__, make


def use_openvino(threads: int) -> tuple[str, Library]:
    openvino: Any = import_module("openvino")
    opset13: Any = import_module("openvino.opset13")

    core = openvino.Core()
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}

    def make(kind: str, arrays: tuple[Array, ...], options: dict[str, Any]) -> Prepared:
        half = arrays[0].dtype.name == "bfloat16"
        if arrays[0].dtype != np.float32 and not half:
            raise NotImplementedError("float32 and bfloat16 only")
        # What it computes in is asked for; arrays of bfloat16 it does not take from NumPy.
        settings["INFERENCE_PRECISION_HINT"] = "bf16" if half else "f32"
        arrays = tuple(array.astype(np.float32, copy=False) for array in arrays)
        if kind == "attention":
            heads, kv_heads = arrays[0].shape[1], arrays[1].shape[1]
            arrays = (arrays[0], *(np.repeat(array, heads // kv_heads, axis=1) for array in arrays[1:]))
        inputs = [opset13.parameter(array.shape, np.float32) for array in arrays]
        if kind == "matmul":
            node = opset13.matmul(*inputs, False, False)
        elif kind == "softmax":
            node = opset13.softmax(inputs[0], -1)
        elif options["visible"] is None:
            node = opset13.scaled_dot_product_attention(*inputs, causal=options["causal"])
        else:
            mask = opset13.constant(options["visible"][None, None])
            node = opset13.scaled_dot_product_attention(*inputs, attention_mask=mask)
        request = core.compile_model(openvino.Model([node], inputs), "CPU", settings).create_infer_request()
        tensors = [openvino.Tensor(array, shared_memory=True) for array in arrays]
        for index, tensor in enumerate(tensors):
            request.set_input_tensor(index, tensor)

        def call() -> Any:
            request.infer()
            return request.get_output_tensor(0)

        # The arrays stay alive with `finish`: a request does not keep the memory that it shares.
        return call, lambda result, alive=arrays: np.array(result.data)

    return openvino.__version__.partition("-")[0], make


def use_onnxruntime(threads: int) -> tuple[str, Library]:
    onnxruntime: Any = import_module("onnxruntime")

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.inter_op_num_threads = 1

    def make(kind: str, arrays: tuple[Array, ...], options: dict[str, Any]) -> Prepared:
        if arrays[0].dtype != np.float32:
            raise NotImplementedError("float32 only")
        feeds: dict[str, Array] = dict(zip("abc", arrays, strict=False))
        finish: Callable[[Any], Array] = lambda result: result[0]  # noqa: E731
        domain, attributes = "", {}
        if kind == "matmul":
            operator = "MatMul"
        elif kind == "softmax":
            operator, attributes = "Softmax", {"axis": -1}
        else:
            batch, heads, length, _ = arrays[0].shape
            kv_heads, key_len = arrays[1].shape[1:3]
            rows = [np.ascontiguousarray(array.swapaxes(1, 2)) for array in arrays]
            flat = [array.reshape(*array.shape[:2], -1) for array in rows]
            feeds = dict(zip("abc", flat, strict=True))
            domain = "com.microsoft"
            if heads != kv_heads or length == 1:
                if not options["causal"] and length > 1:
                    raise NotImplementedError("its grouped attention is always causal")
                operator, attributes = "GroupQueryAttention", {"num_heads": heads, "kv_num_heads": kv_heads}
                for name, array in zip("bc", flat[1:], strict=True):  # the new keys and values
                    feeds[name] = np.ascontiguousarray(array[:, -length:])
                for name, array in zip("de", arrays[1:], strict=True):  # the buffer they are written to
                    feeds[name] = array if length < key_len else array[:, :, :0]
                feeds["f"] = np.full(batch, key_len - 1, np.int32)
                feeds["g"] = np.array(key_len, np.int32)
            else:
                operator = "MultiHeadAttention"
                attributes = {"num_heads": heads, "unidirectional": int(options["causal"])}
                if options["visible"] is not None:
                    # Inputs 4 and 5 (bias, key padding mask) are left out.
                    bias = np.where(options["visible"], 0, -np.inf).astype(np.float32)
                    feeds["attention_bias"] = bias[None, None]

            def finish(result: Any) -> Array:
                output: Array = result[0].reshape(batch, length, heads, -1).swapaxes(1, 2)
                return output

        model = onnx_model(operator, domain, attributes, feeds)
        session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
        if operator != "GroupQueryAttention":
            return lambda: session.run(["y"], feeds), finish

        # Past and present share their memory, else every call would copy all keys and values.
        binding = session.io_binding()
        binding.bind_output("y")
        for name, array in feeds.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(name, value)
            if name in "de" and array.size:
                binding.bind_ortvalue_output({"d": "present_key", "e": "present_value"}[name], value)
        if length == key_len:
            binding.bind_output("present_key")
            binding.bind_output("present_value")

        def call() -> Any:
            session.run_with_iobinding(binding)
            return binding

        return call, lambda bound: finish(bound.copy_outputs_to_cpu())

    return onnxruntime.__version__, make


def onnx_model(operator: str, domain: str, attributes: dict[str, int], feeds: dict[str, Array]) -> bytes:
    """A serialised ONNX graph of one operator: protobuf by hand, the onnx package may not be there."""

    def number(value: int) -> bytes:
        value &= (1 << 64) - 1
        parts = bytearray()
        while value > 127:
            parts.append(value & 127 | 128)
            value >>= 7
        parts.append(value)
        return bytes(parts)

    def field(index: int, value: int | str | bytes) -> bytes:
        if isinstance(value, int):
            return number(index << 3) + number(value)
        content = value.encode() if isinstance(value, str) else value
        return number(index << 3 | 2) + number(len(content)) + content

    def value_info(name: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> bytes:
        tensor = field(1, {"f": 1, "d": 11, "i": 6}[dtype.char])
        if shape is not None:
            tensor += field(2, b"".join(field(1, field(1, size)) for size in shape))
        return field(1, name) + field(2, field(1, tensor))

    names = list(feeds)
    if "attention_bias" in feeds:
        names[3:] = ["", "", "attention_bias"]
    outputs = ["y", "present_key", "present_value"] if operator == "GroupQueryAttention" else ["y"]
    node = b"".join(field(1, name) for name in names) + b"".join(field(2, name) for name in outputs)
    node += field(4, operator) + field(7, domain)
    for name, value in attributes.items():
        node += field(5, field(1, name) + field(3, value) + field(20, 2))
    dtype = feeds["a"].dtype
    graph = field(1, node) + field(2, "row")
    graph += b"".join(field(11, value_info(name, array.dtype, array.shape)) for name, array in feeds.items())
    graph += b"".join(field(12, value_info(name, dtype, None)) for name in outputs)
    versions = field(8, field(1, "") + field(2, 13)) + field(8, field(1, "com.microsoft") + field(2, 1))
    return field(1, 8) + field(7, graph) + versions


LIBRARIES = {"torch": use_torch, "onnxruntime": use_onnxruntime, "openvino": use_openvino, "jax": use_jax}


def serve(name: str, threads: int) -> None:
    """Answer requests until standard input ends; the first answer is the library's version."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers

    def answer(value: Any) -> None:
        pickle.dump(value, answers, protocol=5)
        answers.flush()

    try:
        version, make = LIBRARIES[name](threads)
    except Exception as failure:
        answer(("failed", f"{type(failure).__name__}: {failure}"))
        return
    answer(("done", version))
    call: Call = lambda: None  # noqa: E731
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            if request[0] == "prepare":
                call, finish = make(*request[1:])
                answer(("done", finish(call())))
            else:
                start = time.perf_counter()
                for _ in range(request[1]):
                    call()
                answer(("done", (time.perf_counter() - start) / request[1]))
        except Exception as failure:
            answer(("failed", f"{type(failure).__name__}: {failure}".splitlines()[0][:200]))


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
