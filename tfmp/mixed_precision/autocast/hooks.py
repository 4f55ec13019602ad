"""What autocast needs of TensorFlow that is not public: to see each op before it is made.

TensorFlow has no public way to do that. `tf.experimental.dispatch_for_api` leaves tensors alone, and the graph pass
`auto_mixed_precision` works on GPUs, for the whole process, and not within XLA. But all functions that make ops, those
of `tf.raw_ops` too, come through one of two functions: one for eager code, one for graphs. While a scope is open, these
two are replaced, and a few others:

* Ops that compute gradients keep their types: `tf.GradientTape.gradient` and `tf.gradients` run outside of the scope.
* Functions of `tf.custom_gradient` compute their gradients in the scope in which they were called, as torch's
  `custom_bwd` does, and the gradients get the types of the inputs.
* Branches and loops keep one type: those of `tf.cond` return the wider one, and what a loop carries stays as it began.
* Functions that refuse types in Python are called again in float32, and those that cast their results back to half
  precision get wider inputs.
* A trace of a `tf.function` and `strategy.run` are where a scope from outside would act unseen, or not at all.

Everything is put back when the last scope is left. Whether TensorFlow has the functions is checked when one is entered.
"""

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfmp.core.dtypes import HALF_TYPES
from tfmp.core.tensorflow_internals import op_definition
from tfmp.environment import supported_tensorflow
from tfmp.mixed_precision.autocast import around_calls, around_control_flow, around_ops
from tfmp.mixed_precision.autocast.op_types import FLOATS, OpInputs

_OPS = "tensorflow.python.ops"
_FUNCTION = "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function"
_AUTOGRAPH = "tensorflow.python.autograph.operators.control_flow"
#: The public modules of TensorFlow 1, of which there are copies.
_V1 = ("tensorflow.compat.v1", "tensorflow.compat.v1.compat.v1", "tensorflow.compat.v2.compat.v1")
#: The last one is the module through which the losses of TensorFlow 1 call these functions.
_NN = (*(f"{each}.nn" for each in _V1), f"{_OPS}.nn")
_V1_LINALG = tuple(f"{each}.linalg" for each in _V1)
#: Those that are made of tensors. Others are made of these, and compare their types.
_LINEAR_OPERATORS = tuple(
    f"tensorflow.linalg:LinearOperator{name}"
    for name in (
        "Circulant",
        "Circulant2D",
        "Circulant3D",
        "Diag",
        "FullMatrix",
        "Householder",
        "LowRankUpdate",
        "LowerTriangular",
        "ScaledIdentity",
        "Toeplitz",
        "Tridiag",
    )
)


class _Replacement(NamedTuple):
    """Functions that are replaced while a scope is open."""

    #: The modules, and after a colon perhaps the class, that hold a function of the name. Public modules hold what the
    #: private ones do, under the same name.
    owners: tuple[str, ...]
    #: The names of the functions.
    names: tuple[str, ...]
    #: Takes a function and returns what replaces it.
    around: Callable[[Callable[..., Any]], Callable[..., Any]]


_REPLACEMENTS = (
    _Replacement(("tensorflow.python.pywrap_tfe",), ("TFE_Py_FastPathExecute",), around_ops.around_eager_ops),
    _Replacement(("tensorflow.python.eager.execute",), ("args_to_matching_eager",), around_ops.around_eager_inputs),
    _Replacement(("tensorflow.python.eager.execute",), ("execute",), around_ops.around_eager_results),
    _Replacement(("tensorflow.python.framework.op_def_library",), ("_apply_op_helper",), around_ops.around_graph_ops),
    _Replacement(
        ("tensorflow.python.framework.tensor_conversion_registry",), ("convert",), around_ops.around_conversion
    ),
    _Replacement(("tensorflow.python.util.dispatch",), ("dispatch",), around_ops.around_errors),
    _Replacement((f"{_OPS}.math_ops",), ("_truediv_python3",), around_ops.around_division),
    _Replacement((f"{_OPS}.math_ops",), ("sparse_matmul",), around_ops.around_sparse_products),
    _Replacement(("tensorflow:TensorArray",), ("write", "scatter", "unstack"), around_ops.around_array_writes),
    _Replacement(("tensorflow", "tensorflow.linalg"), ("eig", "eigvals"), around_ops.widened),
    _Replacement(("tensorflow.linalg", *_V1_LINALG), ("expm", "pinv"), around_ops.widened),
    _Replacement((f"{_OPS}.signal.fft_ops", "tensorflow.signal"), ("rfft", "rfft2d", "rfft3d"), around_ops.widened),
    _Replacement(_LINEAR_OPERATORS, ("__init__",), around_ops.widened),
    _Replacement((f"{_OPS}.linalg.linear_operator:LinearOperator",), ("_check_input_dtype",), around_ops.without_check),
    _Replacement((f"{_OPS}.signal.dct_ops", "tensorflow.signal"), ("dct", "idct"), around_ops.widened),
    _Replacement((f"{_OPS}.nn_impl", *_NN), ("moments", "weighted_moments"), around_ops.widened),
    _Replacement(
        (f"{_OPS}.nn_ops",),
        ("softmax_cross_entropy_with_logits_v2_helper", "sparse_softmax_cross_entropy_with_logits"),
        around_ops.widened,
    ),
    _Replacement((f"{_OPS}.ctc_ops",), ("_ctc_loss_impl", "ctc_loss_dense"), around_ops.widened),
    _Replacement(
        _NN,
        ("softmax_cross_entropy_with_logits_v2", "sparse_softmax_cross_entropy_with_logits"),
        around_ops.widened,
    ),
    _Replacement(("tensorflow.python.eager.imperative_grad",), ("imperative_grad",), around_calls.out_of_scope),
    _Replacement((f"{_OPS}.gradients_util",), ("_GradientsHelper",), around_calls.out_of_scope),
    _Replacement(("tensorflow:GradientTape",), ("jacobian", "batch_jacobian"), around_calls.out_of_scope),
    _Replacement(
        (f"{_OPS}.custom_gradient",),
        ("_eager_mode_decorator", "_graph_mode_decorator"),
        around_calls.around_custom_gradients,
    ),
    _Replacement((f"{_OPS}.cond", *_V1), ("cond",), around_control_flow.around_branches),
    _Replacement((f"{_OPS}.while_loop", *_V1), ("while_loop",), around_control_flow.around_loops),
    _Replacement(
        (_AUTOGRAPH,), ("verify_single_cond_var", "_verify_single_loop_var"), around_control_flow.around_comparisons
    ),
    _Replacement(
        ("tensorflow.python.autograph.operators.conditional_expressions",),
        ("_tf_if_exp",),
        around_control_flow.around_expressions,
    ),
    _Replacement((_FUNCTION,), ("__call__", "get_concrete_function"), around_calls.around_functions),
    _Replacement(
        ("tensorflow.python.distribute.distribute_lib:StrategyExtendedV1",),
        ("call_for_each_replica",),
        around_calls.around_replicas,
    ),
)


class _OpenScopes:
    """Replaces the functions while any thread has a scope open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._replaced = contextlib.ExitStack()

    def add(self) -> None:
        """Note that a scope is entered."""
        with self._lock:
            if self._count == 0:
                self._replace()
            self._count += 1

    def remove(self) -> None:
        """Note that a scope is left."""
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._replaced.close()

    def _replace(self) -> None:
        functions = _functions()
        missing = [path for path, (owner, name, _) in functions.items() if not hasattr(owner, name)]
        if missing:
            raise RuntimeError(
                f"tfmp.autocast does not know this TensorFlow, {tf.__version__}, which has no {', '.join(missing)}. It "
                f"works with TensorFlow {supported_tensorflow()}."
            )
        with contextlib.ExitStack() as replaced:
            for owner, name, around in functions.values():
                original = getattr(owner, name)
                replaced.callback(setattr, owner, name, original)
                setattr(owner, name, _replacing(around, original))
            self._replaced = replaced.pop_all()


# Loops enter a scope in each step, so that what is the same is not made again.
@functools.cache
def _replacing(around: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return around(original)


def _functions() -> dict[str, tuple[Any, str, Callable[..., Any]]]:
    """Return by their paths what holds the functions that are replaced, their names, and what goes around them."""
    functions = {}
    for each in _REPLACEMENTS:
        # Copies of a module may be one module.
        owners = [(path, _owner(path)) for path in reversed(each.owners)]
        for path, owner in {id(owner): (path, owner) for path, owner in owners}.values():
            functions.update({f"{path}.{name}": (owner, name, each.around) for name in each.names})
    return functions


#: Of the whole process, as TensorFlow's functions are.
open_scopes = _OpenScopes()


#: Scale and statistics of batch normalization: the op takes bfloat16, and its gradient then fails.
_STATISTICS = frozenset((f"FusedBatchNorm{version}", "U") for version in ("V2", "V3"))
_FLOAT_NUMBERS = frozenset(each.as_datatype_enum for each in FLOATS)


def inputs_of(op: str) -> tuple[list[OpInputs], bool]:
    """Return the inputs of an op that share a type, and whether the op has state."""
    op_def = op_definition(op)
    attributes = {attr.name: _types(attr.allowed_values.list.type) for attr in op_def.attr}
    results = {argument.type_attr for argument in op_def.output_arg}
    returns_floats = any(argument.type in _FLOAT_NUMBERS for argument in op_def.output_arg)
    groups: dict[str, list[tuple[int, str]]] = {}
    inputs = []
    for position, argument in enumerate(op_def.input_arg):
        if argument.type_attr and not argument.is_ref:
            groups.setdefault(argument.type_attr, []).append((position, argument.name))
        elif argument.type in _FLOAT_NUMBERS and not argument.is_ref:
            inputs.append(OpInputs((position,), (argument.name,), _types([argument.type]), is_result=False))
    inputs += [
        OpInputs(
            tuple(at for at, _ in group),
            tuple(name for _, name in group),
            attributes[attr].difference(HALF_TYPES) if (op, attr) in _STATISTICS else attributes[attr],
            is_result=returns_floats or attr in results,
        )
        for attr, group in groups.items()
    ]
    return inputs, op_def.is_stateful


def _types(numbers: Sequence[int]) -> frozenset[tf.DType]:
    # No numbers stand for all types.
    return frozenset(map(tf.as_dtype, numbers)) if numbers else FLOATS


def _owner(path: str) -> Any:  # noqa: ANN401 - a module or a class
    module, _, name = path.partition(":")
    # Public modules are found as attributes: their own names differ between versions of TensorFlow.
    if not module.startswith("tensorflow.python"):
        owner = functools.reduce(lambda owner, part: getattr(owner, part, None), module.split(".")[1:], tf)
    else:
        try:
            owner = importlib.import_module(module)
        except ImportError:
            owner = None
    return getattr(owner, name, None) if name else owner
