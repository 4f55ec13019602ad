from tfmp.grad_scaler.parts import ScaledGradientsOptimizer as ScaledGradientsOptimizer
from tfmp.grad_scaler.scaler import GradScaler as GradScaler
