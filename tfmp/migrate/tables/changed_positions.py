"""Functions whose positional arguments have another order in TensorFlow 2 than in TensorFlow 1."""

# For each position, from 0, the functions of which it is the first that has a different argument. Aliases of a function
# have entries of their own.
_FUNCTIONS = {
    0: "math.in_top_k nn.in_top_k random.poisson",
    1: "batch_to_space nn.dropout nn.space_to_batch shape size space_to_batch",
    2: (
        "argmax argmin boolean_mask convert_to_tensor gather_nd math.argmax math.argmin nn.convolution "
        "nn.embedding_lookup transpose"
    ),
    3: "cond gather image.resize nn.embedding_lookup_sparse nn.moments nn.pool pad",
    4: "gradients nn.conv1d nn.conv2d nn.depthwise_conv2d",
    5: "nn.separable_conv2d",
    7: "while_loop",
}
FIRST_CHANGED = {name: position for position, names in _FUNCTIONS.items() for name in names.split()}
