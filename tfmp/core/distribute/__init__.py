"""How the replicas of one step act together; there is a module for each way of running several replicas."""

from tfmp.core.distribute.base import Distribution as Distribution
from tfmp.core.distribute.base import SingleProcess as SingleProcess
from tfmp.core.distribute.horovod import Horovod as Horovod
from tfmp.core.distribute.mirrored import Mirrored as Mirrored
from tfmp.core.distribute.mirrored import MirroredWorkers as MirroredWorkers
from tfmp.core.distribute.resolve import current_distribution as current_distribution
from tfmp.core.distribute.resolve import current_replica as current_replica
from tfmp.core.distribute.resolve import on_replica as on_replica
