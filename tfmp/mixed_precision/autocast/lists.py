"""Which ops `tfmp.autocast` computes in half precision, and which in float32."""

from typing import NamedTuple

import tensorflow as tf

from tfmp.core.dtypes import HALF_TYPES


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALLOW = _names(
    """
    BatchMatMul BatchMatMulV2 BatchMatMulV3 BlockLSTM BlockLSTMGrad BlockLSTMGradV2 BlockLSTMV2 Conv2D
    Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilter Conv3DBackpropFilterV2 Conv3DBackpropInput
    Conv3DBackpropInputV2 CudnnRNN CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3 CudnnRNNV2 CudnnRNNV3
    DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Einsum FusedPadConv2D
    GRUBlockCell GRUBlockCellGrad LSTMBlockCell LSTMBlockCellGrad MatMul
    """
)

_INFER = _names(
    """
    Add AddN AddV2 AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BiasAdd BiasAddGrad BiasAddV1 Elu EluGrad Erf Erfc
    FloorDiv FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 LeakyRelu LeakyReluGrad Mul
    RealDiv Selu SeluGrad SigmoidGrad SoftplusGrad Softsign SoftsignGrad Sub TanhGrad
    """
)

#: docs/reference/autocast_ops.md has the reasons.
_DENY = _names(
    """
    Acos Acosh Asin Asinh Atanh CTCLoss CTCLossV2 CropAndResize Cosh CumulativeLogsumexp Cumprod Cumsum Digamma Erfinv
    EuclideanNorm Exp Expm1 Inv InvGrad L2Loss LRN Lgamma Log Log1p LogSoftmax Mean Ndtri Pow Prod Reciprocal
    ReciprocalGrad ResizeArea ResizeBicubic ResizeBilinear Rsqrt RsqrtGrad SaveV2 ScaleAndTranslate Sinh Softmax
    SoftmaxCrossEntropyWithLogits Softplus SparseSoftmaxCrossEntropyWithLogits Sqrt SqrtGrad Square SquaredDifference
    Sum Tan Xdivy Xlog1py Xlogy
    """
)

_GATES = _names("Sigmoid Tanh")

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


class AutocastLists(NamedTuple):
    """The names of ops by what `tfmp.autocast` does with them.

    Attributes:
        allow: They compute in half precision.
        infer: They compute in the widest type of their inputs. They may lose precision in half precision.
        deny: They compute in float32.
        clear: They compute in the widest type of their inputs, and lose nothing in half precision.
        gates: They compute in float32, and do not make the ops wider that are given their results.

    The names are those of TensorFlow's pass for graphs. The argument `half` of `tfmp.autocast` adds to `allow`,
    `float32` to `deny`, and `widest` to `infer`; it takes the names off the other lists.

    Provisional: a minor version may change it.
    """

    allow: frozenset[str]
    infer: frozenset[str]
    deny: frozenset[str]
    clear: frozenset[str]
    gates: frozenset[str]


_LISTS = AutocastLists(_ALLOW, _INFER, _DENY, _CLEAR, _GATES)


def autocast_lists(dtype: str | tf.DType = "float16") -> AutocastLists:
    """Return the lists of ops that `tfmp.autocast` goes by.

    An op that stands in no list computes in float32 if its result is a floating-point number and it has no state;
    others take the types that they are given.

    Args:
        dtype: The half-precision type: float16 or bfloat16. Both have the same lists.

    Returns:
        The lists, with the names of `tf.raw_ops`.

    Raises:
        ValueError: `dtype` is no half-precision type.

    Examples:
        >>> "Einsum" in autocast_lists().allow, "Softmax" in autocast_lists("bfloat16").deny
        (True, True)

    Source: the lists of TensorFlow's pass for graphs (`auto_mixed_precision_lists.h` of TensorFlow 2.21) and of
    `torch.autocast`.

    Provisional: a minor version may change it.
    """
    half_dtype(dtype)
    return _LISTS


def half_dtype(dtype: str | tf.DType) -> tf.DType:
    """Return the half-precision type that a user asks for."""
    try:
        half = tf.as_dtype(dtype)
    except TypeError:
        half = None
    if half not in HALF_TYPES:
        raise ValueError(f"dtype must be a half-precision type, float16 or bfloat16, got {dtype!r}.")
    return half
