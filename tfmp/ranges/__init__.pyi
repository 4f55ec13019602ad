from tfmp.ranges.exponents import exponent_counts as exponent_counts
from tfmp.ranges.histogram import RangeHistogram as RangeHistogram
from tfmp.ranges.histogram import RangeShares as RangeShares
from tfmp.ranges.history import RangeHistory as RangeHistory
from tfmp.ranges.history import RangeRecording as RangeRecording
from tfmp.ranges.probes import probe as probe
from tfmp.ranges.report import LayerPrecision as LayerPrecision
from tfmp.ranges.report import PrecisionReport as PrecisionReport
