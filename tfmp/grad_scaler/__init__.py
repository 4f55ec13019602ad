"""Loss scaling in hand-written loops, with the verbs of torch.amp."""

from tfmp.grad_scaler.scaled_gradients import ScaledGradientsOptimizer as ScaledGradientsOptimizer
from tfmp.grad_scaler.scaler import GradScaler as GradScaler
