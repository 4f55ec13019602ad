"""Deprecated names of `tfmp`, for objects that are in packages of it now."""

#: The package and the name that each has now, by its name in `tfmp`.
MOVED = {
    "AutocastLists": ("mixed_precision", "AutocastLists"),
    "LayerPrecision": ("ranges", "LayerPrecision"),
    "PolicyReport": ("mixed_precision", "PolicyReport"),
    "PrecisionReport": ("ranges", "PrecisionReport"),
    "RangeHistogram": ("ranges", "RangeHistogram"),
    "RangeShares": ("ranges", "RangeShares"),
    "ScaledGradientsOptimizer": ("grad_scaler", "ScaledGradientsOptimizer"),
    "autocast_lists": ("mixed_precision", "autocast_lists"),
    "checkpoint_variable_map": ("checkpoints", "variable_map"),
    "exponent_counts": ("ranges", "exponent_counts"),
    "probe": ("ranges", "probe"),
    "read_loss_scale_state": ("checkpoints", "read_loss_scale_state"),
}
