"""Loss scaling for hand-written training loops, with the methods of torch.amp."""

from tfmp.grad_scaler.scaled_gradients import ScaledGradientsOptimizer as ScaledGradientsOptimizer
from tfmp.grad_scaler.scaler import GradScaler as GradScaler
