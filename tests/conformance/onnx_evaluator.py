"""The reference evaluator of the onnx package on a model of a single node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def evaluate(
    operator: str,
    opset: int,
    names: tuple[Sequence[str], Sequence[str]],
    inputs: dict[str, np.ndarray],
    attributes: dict[str, Any],
) -> dict[str, np.ndarray]:
    """The operator's outputs by name. ``names``: all its inputs and outputs, in the operator's order."""
    input_names, output_names = names
    present = [name if name in inputs else "" for name in input_names]
    node = helper.make_node(operator, present, output_names, **attributes)
    graph = helper.make_graph(
        [node],
        operator,
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in inputs.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in output_names],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return dict(zip(output_names, ReferenceEvaluator(model).run(None, inputs), strict=True))
