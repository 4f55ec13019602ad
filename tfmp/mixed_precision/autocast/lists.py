"""Which ops `tfmp.autocast` computes in half precision, and which in float32."""

import functools
from typing import NamedTuple

import tensorflow as tf

from tfmp.core.gradients.arithmetic import HALF_TYPES


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALLOW = _names(
    """
    BatchMatMul BatchMatMulV2 BatchMatMulV3 BlockLSTM BlockLSTMGrad BlockLSTMGradV2 BlockLSTMV2 Conv2D
    Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilter Conv3DBackpropFilterV2 Conv3DBackpropInput
    Conv3DBackpropInputV2 CudnnRNN CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3 CudnnRNNV2 CudnnRNNV3
    DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Einsum
    GRUBlockCell GRUBlockCellGrad LSTMBlockCell LSTMBlockCellGrad MatMul
    """
)

_INFER = _names(
    """
    Add AddN AddV2 AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BiasAdd BiasAddGrad BiasAddV1 Elu EluGrad Erf Erfc
    FloorDiv FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 Inv LeakyRelu LeakyReluGrad
    Log Log1p LogSoftmax Mul Prod RealDiv Reciprocal Selu SeluGrad Sigmoid SigmoidGrad Softmax Softplus SoftplusGrad
    Softsign SoftsignGrad Sqrt Sub Tanh TanhGrad
    """
)

_DENY = _names(
    """
    Exp Expm1 L2Loss Mean Pow SaveV2 SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits Sum
    """
)

_CLEAR = _names(
    """
    Abs ArgMax ArgMin BatchToSpace BatchToSpaceND BroadcastTo Ceil CheckNumerics ClipByValue Concat ConcatV2
    DepthToSpace DynamicPartition DynamicStitch EnsureShape Enter Equal Exit ExpandDims Fill Floor Gather GatherNd
    GatherV2 Greater GreaterEqual Identity IdentityN IsFinite IsInf IsNan Less LessEqual Max MaxPool MaxPool3D
    MaxPool3DGrad MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad MaxPoolGradGradV2 MaxPoolGradV2 MaxPoolV2 Maximum
    Merge Min Minimum MirrorPad MirrorPadGrad Neg NextIteration NotEqual OneHot OnesLike Pack Pad PadV2
    PreventGradient Rank Relu Relu6 Relu6Grad ReluGrad Reshape ResizeNearestNeighbor ResizeNearestNeighborGrad
    Reverse ReverseSequence ReverseV2 Round Select SelectV2 Shape ShapeN Sign Size Slice Snapshot SpaceToBatch
    SpaceToBatchND SpaceToDepth Split SplitV Squeeze StopGradient StridedSlice StridedSliceGrad Switch
    TensorListConcat TensorListConcatLists TensorListConcatV2 TensorListFromTensor TensorListGather
    TensorListGetItem TensorListPopBack TensorListPushBack TensorListPushBackBatch TensorListScatter
    TensorListScatterIntoExistingList TensorListScatterV2 TensorListSetItem TensorListSplit TensorListStack Tile
    TopK TopKV2 Transpose Unpack Where ZerosLike
    """
)

#: What TensorFlow adds for bfloat16, whose range is that of float32.
_ALLOW_IN_BFLOAT16 = frozenset(["FusedPadConv2D"])
_INFER_IN_BFLOAT16 = frozenset(["Mean", "Rsqrt", "Square", "SquaredDifference", "Sum"])
_CLEAR_IN_BFLOAT16 = frozenset(["ResizeBilinear", "ScatterNd"])


class AutocastLists(NamedTuple):
    """The names of ops by what `tfmp.autocast` does with them.

    Attributes:
        allow: They compute in half precision.
        infer: They compute in the widest type of their inputs. They may lose precision in half precision.
        deny: They compute in float32.
        clear: They compute in the widest type of their inputs, and lose nothing in half precision.
    """

    allow: frozenset[str]
    infer: frozenset[str]
    deny: frozenset[str]
    clear: frozenset[str]


def autocast_lists(dtype: str | tf.DType = "float16") -> AutocastLists:
    """Return the lists of ops that `tfmp.autocast` goes by.

    An op that stands in no list computes in float32 if its result has the type of its inputs and it has no state;
    others take the types that they are given.

    Args:
        dtype: The half-precision type: float16 or bfloat16.

    Returns:
        The lists, with the names of `tf.raw_ops`.

    Raises:
        ValueError: `dtype` is no half-precision type.

    Examples:
        >>> "Einsum" in autocast_lists().allow, "Mean" in autocast_lists("bfloat16").infer
        (True, True)

    Source: the lists of TensorFlow's pass for graphs, `auto_mixed_precision_lists.h` of TensorFlow 2.21. Added is
    BatchMatMulV3, which `tf.matmul` makes for `output_type`. Left out are ops that `tf.raw_ops` does not have, and, in
    bfloat16, that oneDNN computes fewer ops in half precision.
    """
    return _lists(half_type(dtype))


@functools.cache
def _lists(dtype: tf.DType) -> AutocastLists:
    if dtype == tf.bfloat16:
        return AutocastLists(
            _ALLOW | _ALLOW_IN_BFLOAT16,
            _INFER | _INFER_IN_BFLOAT16,
            _DENY - _INFER_IN_BFLOAT16,
            _CLEAR | _CLEAR_IN_BFLOAT16,
        )
    return AutocastLists(_ALLOW, _INFER, _DENY, _CLEAR)


def half_type(dtype: str | tf.DType) -> tf.DType:
    """Return a half-precision type.

    Args:
        dtype: The type or its name.

    Raises:
        ValueError: It is none.
    """
    try:
        found = tf.as_dtype(dtype)
    except TypeError:
        found = None
    if found not in HALF_TYPES:
        raise ValueError(f"dtype must be a half-precision type, float16 or bfloat16, got {dtype!r}.")
    return found
