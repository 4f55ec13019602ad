from tfmp.checkpoints.names import variable_map as variable_map
from tfmp.checkpoints.states import SavedLossScale as SavedLossScale
from tfmp.checkpoints.states import read_loss_scale_state as read_loss_scale_state
