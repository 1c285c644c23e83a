"""Post-hoc methods, one family a file; importing one registers it by name."""

from featcal.methods.clip import FeatureClip
from featcal.methods.temperature import Temperature

__all__ = ["FeatureClip", "Temperature"]
