"""What `featcal` offers under its own name: loaded whole when one of these is first asked for.

So every method is registered by then, and `import featcal` itself takes no time.
"""

from featcal.api import calibrate as calibrate
from featcal.api import compare as compare
from featcal.api import evaluate as evaluate
from featcal.core.batch import Batch as Batch
from featcal.core.calibrator import METHODS as METHODS
from featcal.core.calibrator import Calibrator as Calibrator
from featcal.core.calibrator import FeatureMap as FeatureMap
from featcal.core.calibrator import LogitMap as LogitMap
from featcal.core.calibrator import Pipeline as Pipeline
from featcal.core.checks import CalibrationWarning as CalibrationWarning
from featcal.core.checks import InputError as InputError
from featcal.core.fit import Loss as Loss
from featcal.core.text import parse as parse
from featcal.data import Pack as Pack
from featcal.data import import_files as import_files
from featcal.data import write_pack as write_pack
from featcal.data.collect import collect as collect
from featcal.data.pack import demo_pack as demo_pack
from featcal.data.resume import collect_pack as collect_pack
from featcal.heads.attach import attach as attach
from featcal.heads.attach import detach as detach
from featcal.heads.find import find_head as find_head
from featcal.heads.head import CalibratedHead as CalibratedHead
from featcal.io import load as load
from featcal.io import save as save
from featcal.methods import FeatureClip as FeatureClip
from featcal.methods import Temperature as Temperature
from featcal.report import ReliabilityDiagram as ReliabilityDiagram
