"""The contract between the core and an optimizer; `tfmp.hosts` keeps it for each host framework."""

from tfmp.core.adapters.base import OptimizerAdapter as OptimizerAdapter
from tfmp.core.adapters.base import finished as finished
from tfmp.core.adapters.base import is_overwritten as is_overwritten
from tfmp.core.adapters.base import names_of as names_of
from tfmp.core.adapters.base import takes_float32_gradients as takes_float32_gradients
from tfmp.core.adapters.program import Program as Program
