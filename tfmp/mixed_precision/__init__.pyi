from tfmp.mixed_precision.autocast.lists import AutocastLists as AutocastLists
from tfmp.mixed_precision.autocast.lists import autocast_lists as autocast_lists
from tfmp.mixed_precision.levels.existing_models import LayerPolicy as LayerPolicy
from tfmp.mixed_precision.levels.existing_models import PolicyReport as PolicyReport
